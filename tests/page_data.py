"""Small data that stand for those of the pages."""

import json
from pathlib import Path

import numpy as np
from shards import make_image, write_pairs, write_tar
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CHATS = 8


def write_page_data(folder: Path) -> Path:
    """Write `shards` of pairs, `chats` with an image each, and `tokenizer.json` into a folder, which is returned."""
    write_pairs(folder / "shards", 80, 40, median_size=256)
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(["a cat on a mat"], special)
    model.save(str(folder / "tokenizer.json"))
    turns = [{"from": "human", "value": "<image>\nhi"}, {"from": "gpt", "value": "ho"}]
    chat, rng = json.dumps({"conversations": turns}).encode(), np.random.default_rng(0)
    members = [member for i in range(CHATS) for member in ((f"{i}.jpg", make_image(rng, 64, 56)), (f"{i}.json", chat))]
    write_tar(folder / "chats" / "0.tar", members)
    return folder
