"""A run on conversations: its loss is that of what assistants say."""

import io
import json
import math
import random
from pathlib import Path

import pytest
from builders.chats import FAMILIES, draw_conversation, image_count, write_chat_folder
from cli.server_process import run, serving
from PIL import Image
from program.runtime_cases import Degrees
from shards import write_tar
from training.runs import TIMEOUT_S, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def test_a_run_learns_answers_alone(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "qwen", "qwen2-vl")
    rng, members = random.Random(5), []
    buffer = io.BytesIO()
    Image.new("RGB", (32, 16), (200, 0, 0)).save(buffer, "PNG")
    for n in range(24):
        messages = draw_conversation(FAMILIES["qwen2-vl"], rng, n % 3)["messages"]
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = "the cat"
        members += [(f"{n:03}.{i}.png", buffer.getvalue()) for i in range(image_count(messages))]
        members.append((f"{n:03}.json", json.dumps({"messages": messages}).encode()))
    write_tar(tmp_path / "d" / "0.tar", members)
    assert run("index", tmp_path / "d", "--conversations", "chat", "--tokenizer", f"qwen={tokenizer}").returncode == 0
    stream = {
        "datasets": [{"name": "d", "conversations": {"cut_at": "turn"}}],
        "tokenizer": {"name": "qwen"},
        "generation": {"ratio": "0"},
        "seq_len": 1024,
        "global_batch": 4,
        "packing": {"fill": "0.9"},
    }
    with serving("--dataset", f"d={tmp_path / 'd'}", "--tokenizer", f"qwen={tokenizer}") as server:
        trained = Run(server.address, tmp_path / "run")
        options = ("--steps", "12", "--checkpoint.every", "100")
        code, errors = trained.train(Degrees(1, 1, 1, 0, colocated=True), *options, stream=stream)
    assert code == 0, errors
    losses = [step["text_loss"] for step in trained.metrics()]
    vocabulary = 256 + 7 + 6 + 6  # bytes, merges, special tokens, and the job's own
    assert losses[0] > 0.9 * math.log(vocabulary), "the mean over what is learned, not over all tokens"
    assert losses[-1] < 0.1, losses
