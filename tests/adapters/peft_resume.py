"""Adapters of peft in Hugging Face's Trainer, resumed: peft_resume.py SERVER MODEL FOLDER."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from adapters.whole_jobs import whole_job
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration, TrainingArguments

from trainclient.adapters.full_model import FullModelStream
from trainclient.adapters.huggingface import ServedTrainer
from trainclient.adapters.qwen2_vl import Qwen2VLInputs

SERVER, MODEL, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def train(name: str, resume: bool = False) -> PeftModel:
    """Four steps; the first two may have been made before."""
    torch.manual_seed(0)
    base = Qwen2VLForConditionalGeneration.from_pretrained(MODEL)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    job = whole_job(1, {"steps": 4}, global_batch=2)
    options = {"num_train_epochs": 1, "save_steps": 2, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True}
    with FullModelStream(SERVER, job, rank=0, world_size=1) as stream:
        inputs = Qwen2VLInputs.of(base.config, stream.job.stream.sizing)
        arguments = TrainingArguments(str(FOLDER / name), **options)
        ServedTrainer(model, arguments, stream=stream, inputs=inputs).train(resume_from_checkpoint=resume)
    return model


if __name__ == "__main__":
    calm = train("calm").state_dict()
    for name in ("resumed", "changed"):
        shutil.copytree(FOLDER / "calm" / "checkpoint-2", FOLDER / name / "checkpoint-2")
    torch.testing.assert_close(train("resumed", resume=True).state_dict(), calm, rtol=0, atol=0)
    file = FOLDER / "changed" / "checkpoint-2" / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"tensors are not those that .*checkpoint-2 was saved with"):
        train("changed", resume=True)
