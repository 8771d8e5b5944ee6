"""The paper's split as task ids, a user's own split file, and what is refused of it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from seal_jax.envs.bfcl import package, splits
from seal_jax.types import CATEGORIES


@pytest.fixture
def write(tmp_path):
    def write(content) -> str:
        path = tmp_path / "split.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def test_paper_splits_have_the_papers_sizes_and_share_no_scenario():
    paper = splits.paper_splits()
    assert {name: len(ids) for name, ids in paper.items()} == {
        "train": 400,
        "val": 100,
        "test": 300,
        "eval": 400,
        "all": 800,
    }
    assert paper["eval"] == paper["val"] | paper["test"] == paper["all"] - paper["train"]
    for one, other in (("train", "val"), ("train", "test"), ("train", "eval"), ("val", "test")):
        assert splits.shared_scenarios(paper[one], paper[other]) == (0, frozenset())


def test_a_number_is_its_tasks_of_all_categories_and_an_id_is_one_task(write):
    read = splits.read_splits(
        write({"train": [7, "multi_turn_base_8"], "val": ["multi_turn_miss_func_9"], "test": [1]})
    )
    assert read["train"] == {f"multi_turn_{c}_7" for c in CATEGORIES} | {"multi_turn_base_8"}
    assert read["eval"] == {"multi_turn_miss_func_9"} | {f"multi_turn_{c}_1" for c in CATEGORIES}
    assert len(read["all"]) == 800 and "ood" not in read


def test_the_papers_split_written_down_reads_as_the_papers(write):
    content = {name: sorted(splits.SPLITS[name]) for name in ("train", "val", "test")}
    assert splits.read_splits(write(content)) == splits.paper_splits()


def test_a_shuffle_per_category_leaks_and_is_refused_with_the_count(write):
    """Drawn the way the release's JSON split was; the leak is counted here the plain way."""
    rng, train, test = random.Random(0), [], []
    for category in CATEGORIES:
        ids = [f"multi_turn_{category}_{n}" for n in range(200)]
        rng.shuffle(ids)
        train += ids[:100]
        test += ids[100:]
    leaked = sum(any(one.split("_")[-1] == other.split("_")[-1] for other in train) for one in test)
    assert leaked == 344
    path = write({"train": train, "test": test, "seed": 0})
    with pytest.raises(ValueError, match=f"{leaked} of the 400 .* 173 scenarios .*allow_overlap=True"):
        splits.read_splits(path)
    with pytest.warns(UserWarning, match=f"{leaked} of the 400 tasks in 'test'"):
        read = splits.read_splits(path, allow_overlap=True)
    assert read["train"] == set(train) and read["test"] == set(test)


def test_every_evaluated_split_and_the_selecting_one_are_guarded(write):
    for content, words in (
        ({"train": [3], "ood": ["multi_turn_base_3", "multi_turn_base_4"]}, "1 of the 2 tasks in 'ood' .* 'train'"),
        ({"train": ["multi_turn_base_3"], "eval": [3, 4]}, "4 of the 8 tasks in 'eval' .* 'train'"),
        ({"train": [3], "val": [4, 5], "test": [5, 6]}, "4 of the 8 tasks in 'test' .* 'val'"),
    ):
        with pytest.raises(ValueError, match=words):
            splits.read_splits(write(content))
    # The paper's val is a part of its eval.
    assert len(splits.read_splits(write({"train": [3], "val": [4], "eval": [4, 5]}))["eval"]) == 8


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "not a split file"),
        ("{'train': [1]}", "not a split file"),
        ("[" * 100_000, "not a split file"),
        ('{"train": [1], "train": [2]}', "key 'train' stands twice"),
        ([1, 2], "holds a list, not an object"),
        ({}, "holds no split"),
        ({"seed": 0}, "holds no split"),
        ({"train": [1], "dev": [2]}, "key 'dev' is not a split; choose from train, val, test, eval, ood"),
        ({"train": []}, "key 'train' is an empty list"),
        ({"train": 5}, "key 'train' holds 5"),
        ({"train": [1, 200]}, r"train\[1\]=200 is no scenario number; they are 0 to 199"),
        ({"train": [-1]}, r"train\[0\]=-1 is no scenario number"),
        ({"train": [True]}, r"train\[0\]=True is neither"),
        ({"train": [3.0]}, r"train\[0\]=3.0 is neither"),
        ({"train": ["3"]}, r"train\[0\]='3' is neither"),
        ({"test": ["multi_turn_base_03"]}, "'multi_turn_base_03' is neither"),
        ({"test": [4, 5, 4]}, r"test\[2\]=4 is in 'test' already"),
        ({"test": ["multi_turn_base_4", 4]}, r"test\[1\]=4 is in 'test' already"),
    ],
)
def test_what_is_no_split_file_is_refused_in_one_line(write, content, words):
    path = write(content)
    with pytest.raises(ValueError, match=words) as refusal:
        splits.read_splits(path)
    assert path in str(refusal.value) and "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"split_file='.*none.json'.*No such file"):
        splits.read_splits(tmp_path / "none.json")


def test_the_suite_serves_the_files_splits(write):
    try:
        package.package_folder()
    except ImportError as missing:
        pytest.skip(str(missing))
    from seal_jax.envs.base import make_suite

    path = write({"train": [7, "multi_turn_base_8"], "test": ["multi_turn_miss_func_9"]})
    suite = make_suite("bfcl", split_file=path, categories=("base", "miss_func"))
    assert [t.id for t in suite.tasks("train")] == ["multi_turn_base_7", "multi_turn_base_8", "multi_turn_miss_func_7"]
    assert [t.id for t in suite.tasks("eval")] == ["multi_turn_miss_func_9"]
    assert Counter(t.category for t in suite.tasks("all")) == {"base": 200, "miss_func": 200}
    with pytest.raises(ValueError, match="split 'val' is not one of this bfcl suite's: train, test, eval, all"):
        suite.tasks("val")


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "splits.json"
    path.write_bytes(b'\xef\xbb\xbf{"test": [0]}')
    assert len(splits.read_splits(path)["test"]) == 4
