"""The files of a pretrained checkpoint. They come from anywhere: nothing is unpickled, and sizes are checked first."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainclient.models.hf.damaged_files import not_safetensors, not_the_file, once

MAX_CONFIG_BYTES: Final = 1 << 20
MAX_INDEX_BYTES: Final = 64 << 20
MAX_FILES: Final = 1024
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_DTYPES: Final = ("F64", "F32", "F16", "BF16")


class PretrainedError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and the field."""


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes.

    Raises:
        PretrainedError: it cannot be read, is longer, or holds something else.
    """
    try:
        if not path.is_file():
            raise PretrainedError(f"{_absent(path)}; a folder with config.json and safetensors is required")
        with path.open("rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise PretrainedError(f"{path} is longer than {most} bytes; no checkpoint needs as much")
        data = json.loads(text, object_pairs_hook=once)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, PretrainedError):
            raise
        raise PretrainedError(f"{path} holds no JSON: {not_the_file(path) or error}") from None
    if not isinstance(data, dict):
        raise PretrainedError(f"{path} holds a {type(data).__name__}; an object is required")
    return data


class TensorFiles:
    """The tensors of a folder, in one safetensors file or several with an index; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read their headers.

        Raises:
            PretrainedError: there are none, they cannot be read, or the index names a file outside of the folder.
        """
        self._folder = folder
        self._stack = ExitStack()
        self._files_by_name: dict[str, tuple[str, Any]] = {}
        with ExitStack() as stack:
            for file, names in _listed(folder).items():
                self._open(stack, file, names)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, file: str, names: frozenset[str] | None) -> None:
        path = self._folder / file
        try:
            reason = not_safetensors(path)
            if reason:
                raise ValueError(reason)
            opened = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            there = frozenset(opened.keys())
        except (SafetensorError, OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise PretrainedError(f"{path} cannot be read as safetensors: {said}") from None
        for name in sorted(there if names is None else names):
            if name not in there:
                raise PretrainedError(f"{self._folder / INDEX} places {name} in {file}, which does not hold it")
            self._files_by_name[name] = (file, opened)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files_by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._files_by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header of its file."""
        return tuple(self._files_by_name[name][1].get_slice(name).get_shape())

    def file(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._files_by_name[name][0]

    def require_floating(self, name: str) -> None:
        """Raise PretrainedError, from the header of its file, unless a tensor is of a floating type."""
        file, opened = self._files_by_name[name]
        dtype = opened.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise PretrainedError(
                f"{self._folder / file} holds {name} as {dtype}; one of {', '.join(_DTYPES)} is required: quantized "
                "weights cannot be trained"
            )

    def read(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            PretrainedError: it is not of a floating type, or not finite.
        """
        self.require_floating(name)
        file, opened = self._files_by_name[name]
        tensor: Tensor = opened.get_tensor(name)
        _require_finite(tensor, f"{self._folder / file} holds {name}")
        return tensor

    def read_untouched(self, name: str) -> Tensor:
        """A tensor that is no weight of ours: of any type, and finite where it is of a floating one."""
        _, opened = self._files_by_name[name]
        if opened.get_slice(name).get_dtype() in _DTYPES:
            return self.read(name)
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _require_finite(tensor: Tensor, what: str) -> None:
    """Raise PretrainedError where a tensor has NaN or infinities.

    Both are found in its least and largest value, in the time of a copy; to ask of each value takes 30 times that.
    """
    if tensor.numel() and not all(math.isfinite(float(end)) for end in torch.aminmax(tensor)):
        odd = ~tensor.isfinite().flatten()
        first = int(odd.to(torch.uint8).argmax())
        at = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
        raise PretrainedError(
            f"{what} with {int(odd.sum())} of {tensor.numel()} values that are not finite, such as "
            f"{float(tensor.flatten()[first])} at {at}; take weights that are whole"
        )


def _absent(path: Path) -> str:
    """That there is no file, and whether a link says that there is one."""
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, where no file is"
    return f"there is no file {path}"


def _listed(folder: Path) -> Mapping[str, frozenset[str] | None]:
    """The files of a checkpoint with the tensors that each is said to hold; None: all that it holds."""
    if (folder / WEIGHTS).is_file():
        return {WEIGHTS: None}
    if not (folder / INDEX).is_file():
        for path in (folder / WEIGHTS, folder / INDEX):
            if path.is_symlink():
                raise PretrainedError(f"{_absent(path)}; download it again, or mend the link")
        pickled = sorted(path.name for path in folder.glob("*.bin"))[:3] if folder.is_dir() else []
        if pickled:
            raise PretrainedError(
                f"{folder} holds its weights as {', '.join(pickled)}: pickle, which can run code and is never read. "
                "Load it with transformers where you trust it, and save it again with save_pretrained, which writes "
                "safetensors"
            )
        raise PretrainedError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}; a checkpoint with safetensors is required"
        )
    files: dict[str, set[str]] = {}
    weight_map = read_json(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PretrainedError(f"{folder / INDEX} has no weight_map; an object from tensors to files is required")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise PretrainedError(
                f"{folder / INDEX} places {name!r:.100} in {file!r:.100}; the name of a safetensors file in the same "
                "folder is required"
            )
        files.setdefault(file, set()).add(name)
    if len(files) > MAX_FILES:
        raise PretrainedError(f"{folder / INDEX} names {len(files)} files; at most {MAX_FILES} are read")
    gone = [file for file in sorted(files) if not (folder / file).is_file()]
    if gone:
        raise PretrainedError(
            f"{folder / INDEX} names {len(files)} files, and {len(gone)} are not there, such as {gone[0]}; download "
            "them into the same folder"
        )
    return {file: frozenset(names) for file, names in sorted(files.items())}
