"""A job as people write it, made complete from what is here."""

import json
from collections.abc import Mapping
from typing import Any

from dataserver.assembly import BYTES, chat_digest, image_marks, tokenizer_spec, video_timestamps
from dataserver.jobs.catalog import Catalog, quarantine_digest, transformed_digest
from dataserver.jobs.errors import FillingError
from dataserver.planning.job.fields import (
    MAX_SIDE_TILES,
    SPECIAL_TOKENS,
    DatasetSpec,
    FrameRule,
    TokenizerSpec,
    absent_fields,
    is_name,
)


def fill_job(data: Any, catalog: Catalog) -> Any:
    """The values of a job with what it leaves out filled in: fingerprints, quarantine lists, the tokenizer's block.

    Digests of what transforms made are filled in last, since they depend on all that.

    What is there stays, so that a complete job comes back as it is. What does not look like a job is passed on, for
    `parse_job` to refuse.

    Args:
        data: the values of the job's JSON or YAML; they are not changed.
        catalog: datasets and tokenizers to fill in from.

    Raises:
        DatasetUnknownError: a dataset that leaves something out is not here.
        TokenizerUnknownError: nor is the tokenizer.
        TokensMissingError: a dataset was not indexed with its transforms; names the command to run.
        FillingError: the job names no tokenizer and there are several, or states an id at odds with those to fill in.
    """
    absent = absent_fields(data)
    parts = {path[:-1] for path in absent}
    if not parts:
        return data
    stream = dict(data["stream"])
    if isinstance(stream.get("datasets"), list | tuple):
        stream["datasets"] = [
            _filled_dataset(entry, catalog) if ("stream", "datasets", i) in parts else entry
            for i, entry in enumerate(stream["datasets"])
        ]
    if ("stream", "tokenizer") in parts:
        stream["tokenizer"] = _filled_tokenizer(stream.get("tokenizer", {}), catalog)
    for path in parts:
        if path[-1:] == ("conversations",):
            number = int(path[2])
            entry = stream["datasets"][number]
            template = _template_of(stream.get("tokenizer"), entry.get("name"), catalog)
            stream["datasets"][number] = {**entry, "conversations": {"template": template, **entry["conversations"]}}
            sizing = _with_marks(stream.get("sizing", {}), stream.get("tokenizer"), catalog)
            stream["sizing"] = _with_timestamps(sizing, stream.get("tokenizer"), entry.get("name"), catalog)
    for path in absent:
        if path[-1] == "transformed":
            number = int(path[2])
            stream["datasets"][number] = _with_transformed(stream["datasets"][number], stream.get("tokenizer"), catalog)
    return {**data, "stream": stream}


def _filled_dataset(entry: Mapping[str, Any], catalog: Catalog) -> Mapping[str, Any]:
    name = entry.get("name")
    if not is_name(name):
        return entry  # for `parse_job` to refuse
    dataset = catalog.named_dataset(name)
    return {"fingerprint": dataset.fingerprint, "quarantine": quarantine_digest(dataset), **entry}


def _with_transformed(entry: Mapping[str, Any], tokenizer: Any, catalog: Catalog) -> Mapping[str, Any]:
    try:
        spec = DatasetSpec.model_validate_json(json.dumps(entry), strict=True)
        digest = TokenizerSpec.model_validate_json(json.dumps(tokenizer), strict=True).digest
    except (TypeError, ValueError):
        return entry  # for `parse_job` to refuse
    dataset = catalog.named_dataset(spec.name).as_it_was(spec.fingerprint)
    # Without that fingerprint there is nothing to fill in, and the job is refused for it.
    return entry if dataset is None else {**entry, "transformed": transformed_digest(spec, dataset, digest)}


def _filled_tokenizer(block: Mapping[str, Any], catalog: Catalog) -> Mapping[str, Any]:
    name = block["name"] if "name" in block else _only_tokenizer(catalog)
    if not is_name(name):
        return block
    filling = tokenizer_spec(catalog.named_tokenizer(name)).model_dump(mode="json")
    _check_ids(block, {token: filling[token] for token in SPECIAL_TOKENS if token not in block})
    return {**filling, **block}


def _template_of(tokenizer: Any, dataset: Any, catalog: Catalog) -> str:
    """The digest of the chat template of the job's tokenizer for a dataset."""
    name = tokenizer.get("name", BYTES) if isinstance(tokenizer, Mapping) else BYTES
    media = catalog.named_dataset(dataset).media if is_name(dataset) else ()
    found = chat_digest(catalog.named_tokenizer(name), media) if is_name(name) else ""
    if not found:
        raise FillingError(
            f"the job leaves datasets[{str(dataset)[:128]}].conversations.template out, and the tokenizer "
            f"{name!r} has no chat template here: start the server with --tokenizer {name}=FOLDER of a chat model, or "
            "state the template"
        )
    return found


def _with_marks(sizing: Any, tokenizer: Any, catalog: Catalog) -> Any:
    """The sizing with the tokens that the processor of the tokenizer's folder writes between embeddings."""
    name = tokenizer.get("name", BYTES) if isinstance(tokenizer, Mapping) else BYTES
    if not isinstance(sizing, Mapping) or "marks" in sizing or not is_name(name):
        return sizing
    tiles, side = sizing.get("tiles"), sizing.get("side")
    edge = tiles.get("longest_edge") if isinstance(tiles, Mapping) else None
    most = edge // side if type(edge) is int and type(side) is int and side > 0 else 0
    most = min(most, MAX_SIDE_TILES)
    marks = image_marks(catalog.named_tokenizer(name), most, most)
    return sizing if marks is None else {**sizing, "marks": marks}


def _with_timestamps(sizing: Any, tokenizer: Any, dataset: Any, catalog: Catalog) -> Any:
    """The sizing with the text that the processor of the tokenizer's folder writes around the frames of videos."""
    name = tokenizer.get("name", BYTES) if isinstance(tokenizer, Mapping) else BYTES
    video = sizing.get("video", {}) if isinstance(sizing, Mapping) else None
    if not (is_name(name) and is_name(dataset) and isinstance(video, Mapping)) or "timestamps" in video:
        return sizing
    if "video" not in catalog.named_dataset(dataset).media:
        return sizing
    timestamps = video_timestamps(catalog.named_tokenizer(name))
    if timestamps is None:
        return sizing
    if video.get("rule") != FrameRule.QWEN3:
        raise FillingError(
            f"conversations of dataset {dataset!r} have videos, and the processor of tokenizer {name!r} writes the "
            "times of their frames, as the rule qwen3 has them: set sizing.video.rule to qwen3"
        )
    return {**sizing, "video": {**video, "timestamps": timestamps}}


def _only_tokenizer(catalog: Catalog) -> str:
    """The tokenizer of a job that names none."""
    others = sorted(catalog.tokenizers.keys() - {BYTES})
    if others:
        raise FillingError(
            f"the job names no tokenizer, and there are {[*others, BYTES]}: set stream.tokenizer.name to one of them"
        )
    return BYTES


def _check_ids(block: Mapping[str, Any], filled: Mapping[str, int]) -> None:
    """Stated ids have to leave room for those that are filled in, which follow the tokenizer's vocabulary."""
    for token, value in filled.items():
        same = [other for other in SPECIAL_TOKENS if other in block and block[other] == value]
        if same:
            raise FillingError(
                f"stream.tokenizer.{same[0]} is {value}, the id that {token} would be filled in with: state {token}, "
                f"too, or leave {same[0]} out"
            )
    size, needed = block.get("vocab_size"), max(filled.values(), default=-1) + 1
    if isinstance(size, int) and size < needed:
        raise FillingError(
            f"stream.tokenizer.vocab_size is {size}; with the special tokens that are filled in ({', '.join(filled)}) "
            f"at least {needed} is required: raise it, leave it out, or state those tokens"
        )
