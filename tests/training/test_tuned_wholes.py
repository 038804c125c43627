"""Fine-tuning from a folder of a model and a folder of conversations; transformers alone then finds the same loss."""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from cli.forked import run_forked
from cli.server_process import run, serving
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from training.released_folders import FAMILIES, Tuned, base_folder
from training.runs import TIMEOUT_S, steps_of, variables

from trainclient.cli import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * TIMEOUT_S)]
STEPS, TRAINED, HELD_OUT = 50, 64, 16
QUESTION = "What does this photograph show?"


def conversations(photographs: Path) -> Iterator[dict[str, Any]]:
    """Lines of a manifest over the photographs of a tar that are JPEGs, with their captions as answers."""
    with tarfile.open(photographs) as tar:
        texts = {member.name: member for member in tar if member.name.endswith(".txt")}
        for name, member in sorted(texts.items()):
            file, image = tar.extractfile(member), tar.extractfile(name.replace(".txt", ".jpg"))
            assert file is not None
            assert image is not None
            caption, picture = file.read().decode().strip()[:80].strip(), Image.open(image)
            if picture.format == "JPEG" and picture.mode == "RGB" and caption.isascii():
                turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": caption}]
                yield {"image": f"{photographs.name}/{name.replace('.txt', '.jpg')}", "conversations": turns}


def job(family: Tuned, dataset: str, epochs: int) -> dict[str, Any]:
    """Two stages of the backbone; what it leaves out is for the servers to fill in."""
    return {
        "stream": {
            "datasets": [{"name": dataset, "conversations": {}}],
            "tokenizer": {"name": "chat"},
            "sizing": {**family.sizing, "resampling": "bicubic", "quality": "exact"},
            "seq_len": 512,
            "global_batch": 4,
        },
        "execution": {
            "modules": [{"name": "encoder", "kind": "encoder"}, {"name": "backbone", "kind": "backbone", "pp": 2}],
            "end": {"epochs": epochs},
        },
    }


def train(
    family: Tuned, base: Path, photographs: Path, folder: Path, options: Sequence[str]
) -> tuple[list[dict[str, Any]], Path]:
    """Index, serve, train and export; the steps of the run, and the folder of the trained model."""
    lines = list(conversations(photographs / "00000.tar"))[: TRAINED + HELD_OUT]
    assert len(lines) == TRAINED + HELD_OUT
    served = []
    for name, part, epochs in (("sft", lines[:TRAINED], 100), ("held", lines[TRAINED:], 1)):
        (folder / name).mkdir()
        (folder / name / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job(family, name, epochs)))
        tokenizer = ("--tokenizer", f"chat={base}")
        done = run("index", folder / name, "--images-root", photographs, "--conversations", "chat", *tokenizer)
        assert done.returncode == 0, done.stderr
        served += ["--dataset", f"{name}={folder / name}"]
    with serving(*served, *tokenizer) as server:
        words = ["trainclient", "train", "--job", str(folder / "sft.yaml"), "--servers", server.address]
        words += ["--models.from", str(base), "--checkpoint.directory", str(folder / "checkpoints")]
        words += ["--steps", str(STEPS), "--optimizer.lr", "0.003", "--metrics", str(folder / "metrics.jsonl")]
        words += ["--evaluation.job", str(folder / "held.yaml"), "--evaluation.every", str(STEPS)]
        words += ["--threads", "1", *options]
        done = run_forked(words, folder, variables(), TIMEOUT_S)
        assert done.returncode == 0, done.stderr
    line = ["export", "--checkpoint", str(folder / "checkpoints"), "--base", str(base)]
    assert main([*line, "--output", str(folder / "trained")]) == 0
    return steps_of(folder / "metrics.jsonl"), folder / "trained"


def theirs(family: Tuned, trained: Path, lines: list[dict[str, Any]], photographs: Path) -> float:
    """Mean loss of the answers by what the exported folder holds and transformers alone."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(trained).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    processor = transformers.AutoImageProcessor.from_pretrained(trained, backend="pil")
    total, count = 0.0, 0
    for line in lines:
        tar, name = line["image"].split("/")
        with tarfile.open(photographs / tar) as file:
            data = file.extractfile(name)
            assert data is not None
            seen = processor(Image.open(io.BytesIO(data.read())), return_tensors="pt")
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        answer = [{"type": "text", "text": line["conversations"][1]["value"]}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        rows = seen["image_grid_thw"].prod() // 4 if "image_grid_thw" in seen else 16
        text = text.replace(family.image, family.image * int(rows))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answered = learned(text, line["conversations"][1]["value"], encoded["offset_mapping"])
        ids = torch.tensor(encoded.input_ids)
        kinds = (
            {"mm_token_type_ids": (ids == model.config.image_token_id).int()[None]} if "image_grid_thw" in seen else {}
        )
        with torch.no_grad():
            logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), **seen, **kinds).logits[0]
        total += float(cross_entropy(logits[answered - 1].double(), ids[answered], reduction="sum"))
        count += len(answered)
    return total / count


def learned(text: str, answer: str, offsets: list[tuple[int, int]]) -> Tensor:
    """Numbers of the tokens of the answer, and of the special token that ends it."""
    first = text.rindex(answer)
    end = first + len(answer)
    end += len("<|im_end|>") if text.startswith("<|im_end|>", end) else 0
    return torch.tensor([n for n, (begin, behind) in enumerate(offsets) if begin < end and behind > first])


ADAPTERS = ("--encoder.lora.rank", "4", "--backbone.lora.rank", "4", "--optimizer.lr", "0.01")


@pytest.mark.parametrize(
    ("name", "options", "falls_to"),
    [("qwen2-vl", (), 0.7), ("llava", (), 0.7), ("qwen2-vl", ADAPTERS, 0.9)],
    ids=["qwen2-vl", "llava", "qwen2-vl with adapters"],
)
def test_transformers_alone_finds_the_loss_of_a_tuned_model(
    name: str, options: Sequence[str], falls_to: float, shared_data: Path, tmp_path: Path
) -> None:
    """Adapters of both parts are merged on the way."""
    family, photographs = FAMILIES[name], shared_data / "laion-mini"
    base = base_folder(family, tmp_path / "base")
    steps, trained = train(family, base, photographs, tmp_path, options)
    lines = list(conversations(photographs / "00000.tar"))[TRAINED : TRAINED + HELD_OUT]
    before, after = (theirs(family, folder, lines, photographs) for folder in (base, trained))
    held_out = steps[-1]["evaluation"]
    assert (held_out["samples"], held_out["images"], held_out["invalid_images"]) == (HELD_OUT, HELD_OUT, 0)
    assert after < falls_to * before
    assert held_out["text_loss"] == pytest.approx(after, rel=1e-5)
