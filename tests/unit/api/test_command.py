"""A command as a child process of a program: its result, its error, what it prints, and how it is stopped."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlcli.api.command import call, settings_words
from rlcli.config.load import resolve
from rlcli.data.prompts.parquet_schema import write_prompts
from rlcli.errors import ConfigError, DataError, RunFailed
from rlcli.types import Prompt


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """The address of a server that accepts connections and never answers, and its socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1", server


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    prompt = Prompt(
        "", ({"role": "user", "content": "1+1="},), "sums", "math", "gsm8k", "2", {"split": "test", "index": 0}
    )
    write_prompts(tmp_path / "test.parquet", [prompt])
    return tmp_path


def commands() -> list[psutil.Process]:
    """The commands that this program runs."""
    leaf_commands = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another test's process, which has ended
            if "rlcli.api.command_child" in child.cmdline():
                leaf_commands.append(child)
    return leaf_commands


@contextmanager
def asked(server: socket.socket, then: Callable[[], None]) -> Iterator[None]:
    """Call `then` from a thread once the server is asked something, which it does not answer."""

    def wait() -> None:
        with server.accept()[0] as connection:
            then()
            with suppress(ConnectionError):
                while connection.recv(1 << 16):  # until the command closes it
                    pass

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def test_a_command_gives_its_result() -> None:
    recipe = call("recipes", ["show", "grpo", *settings_words({"train.steps": 7})])
    assert recipe["values"]["train.steps"] == 7


@pytest.mark.long
def test_the_error_of_a_command_is_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        call("eval", ["--model=x"])
    assert refused.value.message == "no data is given"
    assert "--data" in refused.value.hint
    with pytest.raises(DataError, match="no such file or folder"):
        call("eval", ["--endpoint=http://127.0.0.1:1", f"--data={tmp_path / 'none'}"])
    assert "error" not in capsys.readouterr().err


@pytest.mark.long
def test_on_a_terminal_a_command_draws_its_own_view(silent: tuple[str, socket.socket], rows: Path) -> None:
    url, server = silent
    code = f"from rlcli.api.command import call; call('eval', ['--endpoint={url}', '--data={rows}'])"
    ours, its = pty.openpty()
    program = subprocess.Popen([sys.executable, "-c", code], stderr=its, env={**os.environ, "TERM": "xterm"})
    os.close(its)
    shown = b""
    with server.accept()[0]:  # unanswered, so that the view stays
        while f"ask {url}".encode() not in shown:
            shown += os.read(ours, 1 << 16)
    server.close()
    with suppress(OSError):  # how a terminal ends
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    program.wait()
    assert b"\x1b[?25l" in shown  # the live view hides the cursor
    assert b"EndpointError" in shown


@pytest.mark.long
def test_an_interrupt_stops_the_command_and_is_raised(
    silent: tuple[str, socket.socket], rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, server = silent

    with asked(server, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        call("eval", [f"--endpoint={url}", f"--data={rows}"])
    assert commands() == []
    assert "interrupted" in capsys.readouterr().err  # what a command prints appears here


def test_a_command_ends_with_its_program(silent: tuple[str, socket.socket], rows: Path) -> None:
    url, server = silent
    code = f"from rlcli.api.command import call; call('eval', ['--endpoint={url}', '--data={rows}'])"
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    connection, _ = server.accept()
    (command,) = psutil.Process(program.pid).children()
    program.kill()
    program.wait()
    with connection:
        gone, _ = psutil.wait_procs([command], timeout=60)
    assert gone == [command]


@pytest.mark.long
def test_a_command_that_is_killed_is_named(silent: tuple[str, socket.socket], rows: Path) -> None:
    url, server = silent

    with (
        asked(server, lambda: commands()[0].kill()),
        pytest.raises(RunFailed, match="rlcli eval was killed by SIGKILL"),
    ):
        call("eval", [f"--endpoint={url}", f"--data={rows}"])


def test_settings_reach_the_configuration_as_they_are() -> None:
    settings = {
        "train.lr": 1e-5,
        "train.steps": np.int64(7),
        "train.deterministic": True,
        "tracking.trackers": ("wandb", "mlflow"),
        "tracking.project": 'my "best" = 1',
        "data.chat_template_kwargs.enable_thinking": False,
        "rollout.gpu_memory_utilization": np.float32(0.5),
        "verifier.name": Path("rewards.py:right"),
    }
    texts = [word.removeprefix("--set=") for word in settings_words(settings)]
    values = resolve("grpo", {}, texts).values()
    assert values["train.lr"] == 1e-5
    assert values["train.steps"] == 7
    assert values["train.deterministic"] is True
    assert values["tracking.trackers"] == ["wandb", "mlflow"]
    assert values["tracking.project"] == 'my "best" = 1'
    assert values["data.chat_template_kwargs.enable_thinking"] is False
    assert values["rollout.gpu_memory_utilization"] == 0.5
    assert values["verifier.name"] == "rewards.py:right"


def test_a_setting_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"settings: train\.lr = .* is of type object"):
        settings_words({"train.lr": object()})
