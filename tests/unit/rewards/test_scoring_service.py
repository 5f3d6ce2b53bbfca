"""The scoring service of a machine: shared by its engines, killed, started again, and gone with the last of them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlcli.errors import VerifierError
from rlcli.rewards.processes.scoring_pool import ScoringPool
from rlcli.rewards.service import scoring_service
from rlcli.rewards.service.scoring_client import Scored, ScoringClient, tokenizer_json
from rlcli.rewards.service.scoring_service import Settings
from rlcli.training.worker import worker_scoring
from rlcli.types import Outcome, Prompt, Verdict

WORDS = [*map(str, range(10)), "#", "<eos>"]
EOS = WORDS.index("<eos>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a word; `####` is read from four of them, as nothing stands between words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="0"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/tmp/rlcli-scoring-test-{os.getpid()}-{threading.get_ident() % 10_000}")
    yield path
    assert until(lambda: not path.exists(), 30.0), "the service outlives its last client"


def settings(*verifiers: str, processes: int = 1) -> Settings:
    return Settings("/no/such/model", processes, 5.0, verifiers or ("gsm8k",), "", "")


def until(true: Callable[[], object], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def prompt(truth: str, verifier: str = "gsm8k", **extra: object) -> Prompt:
    return Prompt("toy:0", ({"role": "user", "content": "?"},), "toy", "", verifier, truth, extra)


def ask(client: ScoringClient, number: int, source: Prompt | None = None) -> Future[Scored]:
    ids = [WORDS.index(word) for word in f"####{number}"] + [EOS]
    return client.submit(source or prompt("42"), array("i", ids).tobytes(), 1, {"finish_reason": "stop"})


def services(folder: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


@pytest.mark.long
def test_engines_of_a_machine_share_one_service_that_goes_with_the_last(folder: Path, tokenizer: Any) -> None:
    clients = [ScoringClient(settings(), folder, tokenizer) for _ in range(2)]
    for client in clients:
        client.wait_ready()
    [process] = services(folder)
    scored = [ask(client, number).result() for client in clients for number in (42, 41)]
    assert [result.text for result in scored] == ["####42", "####41"] * 2
    assert [result.verdict.outcome for result in scored] == [Outcome.OK, Outcome.WRONG] * 2
    assert scored[0].verdict.answer == "42"
    tokens = array("i", [4, 2]).tobytes()
    reply = (
        clients[0]
        .submit(prompt("", "bad_verifiers:how"), tokens, 0, {"finish_reason": "length", "thinking": True})
        .result()
    )
    assert reply.verdict.answer == repr(("length", True, [4, 2], ({"role": "user", "content": "?"},), "toy"))
    others = [(tokens, 0), (tokens, 1)]
    row = prompt("", "bad_verifiers:ranked(other_responses=2)")
    reply = clients[0].submit(row, tokens, 0, {"other_responses": others}).result()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in ([4, 2], [4])]
    assert (reply.verdict.score, reply.verdict.answer) == (2.0, repr(texts))
    clients[0].close()
    assert ask(clients[1], 42).result().verdict.score == 1.0
    with pytest.raises(VerifierError, match="closed"):
        ask(clients[0], 42)
    clients[1].close()
    psutil.wait_procs([process], 30.0)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    restarted = ScoringClient(settings(), folder, tokenizer)
    assert ask(restarted, 42).result().verdict.score == 1.0
    restarted.close()


@pytest.mark.long
def test_a_killed_service_is_replaced_and_no_verdict_lost(folder: Path, tokenizer: Any) -> None:
    slow = prompt("42", "bad_verifiers:misbehave_slowly")
    clients = [ScoringClient(settings(), folder, tokenizer) for _ in range(2)]
    for _ in range(2):
        pending = [(number, ask(client, number, slow)) for number in range(40) for client in clients]
        pending[0][1].result()
        [process] = services(folder)
        children = process.children(recursive=True)
        process.kill()
        assert [scored.result().text for _, scored in pending] == [f"####{number}" for number, _ in pending]
        assert psutil.wait_procs(children, 10.0)[1] == []
    for client in clients:
        client.close()


def test_a_row_is_sent_once_for_all_its_responses(folder: Path, tokenizer: Any) -> None:
    row = prompt("42", cases="7" * (5 << 20))
    client = ScoringClient(settings(), folder, tokenizer)
    futures = [ask(client, 42, row) for _ in range(512)]
    assert {future.result().verdict.score for future in futures} == {1.0}
    assert client.bytes_sent < (5 << 20) + 512 * 1000
    client.close()


@pytest.mark.long
def test_a_service_without_verifier_or_that_keeps_dying_is_an_error(folder: Path, tokenizer: Any) -> None:
    client = ScoringClient(settings("no_such_module:f"), folder, tokenizer)
    with pytest.raises(VerifierError, match="does not load: ModuleNotFoundError"):
        client.wait_ready()
    with pytest.raises(VerifierError, match="does not load"):
        ask(client, 42)
    client.close()
    assert until(lambda: not folder.exists(), 30.0)
    folder.mkdir(mode=0o700)
    (folder / "tokenizer.json").write_text("{}")  # which no tokenizer reads
    client = ScoringClient(settings(), folder, tokenizer)
    with pytest.raises(VerifierError, match="died 4 times before it gave a verdict"):
        client.wait_ready()
    client.close()
    for leftover in folder.iterdir():
        leftover.unlink()
    folder.rmdir()


@pytest.mark.long
def test_what_waits_is_cancelled_where_the_client_hangs_up(folder: Path, tokenizer: Any) -> None:
    client = ScoringClient(settings(), folder, tokenizer)
    client.wait_ready()
    futures = [ask(client, 42, prompt("", "bad_verifiers:misbehave_slowly")) for _ in range(200)]
    client.close()
    with pytest.raises(CancelledError):
        futures[-1].result(1.0)


@pytest.mark.long
def test_a_source_that_was_evicted_is_sent_again(folder: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr(scoring_service, "SOURCES_BYTES", 3000)
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener, ScoringPool(1, 5.0, ["gsm8k"]) as pool:
        listener.bind(str(folder / "socket"))
        listener.listen()
        service = scoring_service.Service(listener, folder, pool, lambda ids: "".join(WORDS[number] for number in ids))
        serving = threading.Thread(target=service.serve)
        serving.start()
        client = ScoringClient(settings(), folder, tokenizer)
        rows = [prompt(f"{'x' * 1000} #### {number}") for number in range(5)]
        for number in (0, 1, 2, 3, 4, 0, 1, 4):
            assert ask(client, number, rows[number]).result().verdict == Verdict(
                1.0, Outcome.OK, str(number), {}, "", pytest.approx(0.0, abs=1e9)
            )
        assert client.bytes_sent > 7 * 1000
        client.close()
        serving.join(30.0)


def test_the_tokenizer_is_handed_on_where_its_library_decodes_alike(tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(tokenizer_json(tokenizer))
    ids = [1, 2, EOS, 3]
    decoded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids, skip_special_tokens=True)
    assert decoded == tokenizer.decode(ids, skip_special_tokens=True) == "123"

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    backend = tokenizer.backend_tokenizer
    assert tokenizer_json(Own(tokenizer_object=backend)) == ""
    assert tokenizer_json(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)) == ""
    assert tokenizer_json(None) == ""


def test_workers_of_a_machine_are_counted_and_leave_nothing() -> None:
    spec: Any = SimpleNamespace(group_id=f"t{os.getpid()}", name="rank")
    for rank in range(3):
        worker_scoring.note_worker(spec, rank)
    assert len(list(worker_scoring._noted(spec).iterdir())) == 3
    for rank in range(3):
        assert worker_scoring._noted(spec).exists()
        worker_scoring.forget_worker(spec, rank)
    assert not worker_scoring._noted(spec).exists()


@pytest.mark.long
def test_a_group_is_one_call_of_its_verifier(folder: Path, tokenizer: Any) -> None:
    verifier = "foreign_rewards:unique_in_group"
    client = ScoringClient(Settings("/no/such/model", 1, 5.0, (verifier, "gsm8k"), "", "", steps=50), folder, tokenizer)
    client.wait_ready()
    assert client.grouped == {verifier}
    frames = [(array("i", [number]).tobytes(), 0, {"finish_reason": "stop", "step": 8}) for number in (1, 2, 3, 1)]
    scored = [future.result() for future in client.submit_group(prompt("", verifier), frames)]
    assert [result.text for result in scored] == ["1", "2", "3", "1"]
    assert [result.verdict.score for result in scored] == [0.0, 1.0, 1.0, 0.0]
    assert {result.verdict.extra["calls"] for result in scored} == {"4 for 1"}
    assert {result.verdict.parts["log/step"] for result in scored} == {7.0}
    assert [result.checksum for result in scored] == [zlib.crc32(tokens) for tokens, _, _ in frames]
    client.close()
