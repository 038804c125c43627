"""The same samples in tars, Parquet files, manifests and folders: the same index, tensors and token ids."""

from pathlib import Path

import numpy as np
import pytest
from assembly.test_prepared_views import Run, open_run, tensors_of
from builders.loose import write_folder, write_manifest
from builders.parquets import WRITERS, pairs_table, tar_documents, tar_pairs, write_table
from shards import write_interleaved, write_pairs


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tars")
    write_pairs(root / "pairs", formats=("JPEG", "PNG", "WEBP"), parquet=False)
    write_interleaved(root / "documents")
    return root


def opened(root: Path) -> Run:
    return open_run([root / "pairs", root / "documents"])


@pytest.fixture(scope="module")
def expected(tars: Path) -> Run:
    return opened(tars)


@pytest.mark.slow
@pytest.mark.parametrize("writer", [*WRITERS, "manifest", "folder"])
def test_tensors_do_not_depend_on_the_format(tars: Path, expected: Run, tmp_path: Path, writer: str) -> None:
    for tar in tars.rglob("*.tar"):
        if writer in ("manifest", "folder"):
            path = (tmp_path / tar.relative_to(tars)).with_suffix("")
            write_folder(tar, path) if writer == "folder" else write_manifest(tar, path.with_suffix(".jsonl"))
            continue
        table = tar_documents(tar) if tar.parent.name == "documents" else pairs_table(tar_pairs(tar))
        write_table((tmp_path / tar.relative_to(tars)).with_suffix(".parquet"), table, writer)
    found = opened(tmp_path)
    for one, other in zip(expected.datasets, found.datasets, strict=True):
        for shard, same in zip(one.shards, other.shards, strict=True):
            assert shard.keys() == same.keys()
            for name in ("text_offsets", "image_offsets", "kinds", "image_width", "image_height", "text_bytes"):
                assert np.array_equal(getattr(shard.sizes(), name), getattr(same.sizes(), name))
    count = 0
    for (plan, view), (other_plan, other_view) in zip(expected.views(), found.views(), strict=True):
        assert np.array_equal(plan.samples.sample, other_plan.samples.sample)
        arrays = tensors_of(expected.prepare(plan, view))
        others = tensors_of(found.prepare(other_plan, other_view))
        assert arrays.keys() == others.keys()
        for name, array in arrays.items():
            assert np.array_equal(array, others[name]), (view, name)
            count += array.size
    assert count > 10_000
