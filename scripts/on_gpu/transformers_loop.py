"""transformers' Trainer on a Llama of the preset: `transformers_loop.py PRESET LAYERS SEQ_LEN SEQUENCES DEVICE`.

As many tokens a step as ours, one sequence at a time, without an encoder. In bfloat16 throughout: no copies of the
parameters in float32, unlike ours. Prints the seconds of each step as JSON.
"""

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from trainclient.models.presets import BACKBONES

VOCABULARY = 262


class Times(TrainerCallback):
    """Notes how many seconds each step takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        """Note when a step begins."""
        del given, named
        self._began = _now()

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """Note how long it took, the update included."""
        del given, named
        self.seconds.append(_now() - self._began)


def model(preset: str, layers: int, seq_len: int) -> LlamaForCausalLM:
    """A Llama of these sizes with random weights."""
    size = BACKBONES[preset]
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=seq_len,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("numbers", type=int, nargs=3)
    parser.add_argument("device")
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    layers, seq_len, sequences = given.numbers
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(given.device):
        network = model(given.preset, layers, seq_len)
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(VOCABULARY, (given.steps * sequences, seq_len), generator=torch.Generator().manual_seed(1))
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=sequences,
            max_steps=given.steps,
            optim="adamw_torch_fused" if given.device == "cuda" else "adamw_torch",
            bf16=given.device == "cuda",
            use_cpu=given.device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(network, arguments, train_dataset=data, callbacks=[times]).train()
    print(json.dumps(times.seconds))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
