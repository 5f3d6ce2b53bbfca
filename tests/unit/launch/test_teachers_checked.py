"""Teachers that cannot score the student's tokens, and rows without a teacher, are refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import row, write_rows
from rlcli.errors import ConfigError, ModelError, RlcliError
from rlcli.launch.preflight import prepare
from rlcli.launch.prepared_run import Prepared
from rlcli.launch.run_plan import derived_plan
from rlcli.model.io.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a student, a teacher, others with another vocabulary or few positions, and rows of two sources."""
    folder = tmp_path_factory.mktemp("places")
    for name, seed in (("student", 0), ("teacher", 1), ("foreign", 2), ("short", 3)):
        make_tiny_model(folder / name, seed=seed)
    tokenizer = folder / "foreign" / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    tokenizer.write_text(json.dumps(words))
    config = folder / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 40}))
    messages = [{"role": "user", "content": "1+1="}]
    columns = {"messages": messages, "verifier": "gsm8k", "ground_truth": "2"}
    write_rows(folder / "train.parquet", [row(data_source=source, **columns) for source in ("sums", "words")])
    return folder


def prepared(root: Path, teacher: str, *sets: str) -> Prepared:
    flags = {"model.path": str(root / "student"), "data.path": str(root), "cluster.device": "cpu"}
    small = ("rollout.max_response_tokens=24", "data.max_prompt_tokens=24", "rollout.kv_cache_mb=64")
    return prepare(resolve("opd", flags, [*small, f"teacher.path={teacher.format(at=root)}", *sets]).config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("teacher", "error", "says"),
    [
        ("{at}/nothing", ModelError, "there is no such folder"),
        ("{at}/foreign", ModelError, "its vocabulary is not the policy's: the token '0' is"),
        ("{at}/short", ModelError, "it has 40 positions, and samples up to 48 tokens"),
        ('[{{path = "{at}/teacher", sources = ["sums"]}}]', ConfigError, "source 'words' have no teacher"),
        (
            '[{{path = "{at}/teacher", sources = ["sum"]}}, "{at}/teacher"]',
            ConfigError,
            "no row has the data source 'sum'; the data has sums, words",
        ),
        ("http://127.0.0.1:9", ModelError, "teacher.path = 'http://127.0.0.1:9': http://127.0.0.1:9 cannot be reached"),
        ("http://127.0.0.1:9/v1", ConfigError, "is not the URL of a server; give one like http://localhost:8000"),
        ('[{{path = "{at}/foreign", sources = ["sums"]}}, "{at}/teacher"]', ModelError, "its vocabulary is not"),
    ],
)
def test_what_cannot_be_scored_is_refused(root: Path, teacher: str, error: type[RlcliError], says: str) -> None:
    with pytest.raises(error) as refused:
        prepared(root, teacher)
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_token_that_the_teacher_lacks_is_named(root: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "more", seed=1)
    file = tmp_path / "more" / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"]["née"] = words["model"]["vocab"].pop("7")
    file.write_text(json.dumps(words))
    with pytest.raises(ModelError, match=r"the token '7' is \d+ in \S+/student and missing in \S+/more"):
        prepared(root, str(tmp_path / "more"))


@pytest.mark.long
def test_the_plan_names_the_teachers_and_who_is_taught(root: Path) -> None:
    two_teachers = '[{{path = "{at}/teacher", sources = ["sums"]}}, "{at}/student"]'
    ready = prepared(root, two_teachers)
    assert ready.facts.roles == {"policy", "engine", "teacher"}
    shown = dict(derived_plan(ready))["teacher"]
    assert shown == (
        f"{root}/teacher for sums; {root}/student for all others: log-probs of the sampled tokens, "
        "in the policy's workers"
    )
    top = ("algorithm.advantage=one", "algorithm.loss=opd_forward", "teacher.top_k=4", "teacher.workers=1")
    separate = prepared(root, "{at}/teacher", *top)
    assert separate.facts.roles == {"policy", "engine"}
    assert dict(derived_plan(separate))["teacher"] == (
        f"{root}/teacher: log-probs of its 4 likeliest tokens and the rest, 1 separate worker"
    )
