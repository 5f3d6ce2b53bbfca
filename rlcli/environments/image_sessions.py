"""Sessions whose pictures become what the model sees, in a thread of their own: no call's deadline waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlcli.environments.environment import EnvironmentFailed, Failure, Message, Opening, Reply
from rlcli.environments.environment_host import Session
from rlcli.images.image_processor import NoRoom, Sight
from rlcli.images.row_images import BadImage

Answer = TypeVar("Answer", Opening, Reply)


class Eyes:
    """sight: of a model that sees pictures. most: tokens of the pictures in one answer."""

    def __init__(self, sight: Sight | None, most: int) -> None:
        self.sight, self._most = sight, most
        self._thread = ThreadPoolExecutor(1, "pictures")

    def session(self, session: Session) -> SeeingSession:
        return SeeingSession(session, self)

    def seen(self, asked: Future[Answer]) -> Future[Answer]:
        """The answer with what the model sees of its pictures, and small copies of them in their place."""
        found: Future[Answer] = Future()

        def look(answer: Answer) -> None:
            _settle(found, lambda: self._seen(answer))

        def pass_on(done: Future[Answer]) -> None:
            if done.exception() is not None or not done.result().images:
                _settle(found, done.result)
                return
            try:
                self._thread.submit(look, done.result())
            except RuntimeError:  # it is shut down
                found.set_exception(EnvironmentFailed(Failure.DIED, "its run ends"))

        asked.add_done_callback(pass_on)
        return found

    def close(self) -> None:
        """Harmless when repeated."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _seen(self, answer: Answer) -> Answer:
        if self.sight is None:
            raise EnvironmentFailed(Failure.PROTOCOL, "it showed a picture, and the model reads text alone")
        try:
            shown = self.sight.shown(answer.images, self._most)
        except NoRoom:
            return replace(answer, images=(), fits=False)
        except BadImage as error:
            if isinstance(answer, Reply) and answer.done:  # nobody sees it
                return replace(answer, images=())
            raise EnvironmentFailed(Failure.PROTOCOL, f"it showed what cannot be seen: {error}") from error
        return replace(answer, images=(), pictures=shown.pictures, copies=shown.copies)


class SeeingSession:
    """A session, as `rlcli.environments.environment_host.Session` is one."""

    def __init__(self, session: Session, eyes: Eyes) -> None:
        self._session, self._eyes = session, eyes

    def reset(self, row: Mapping[str, Any], seed: int) -> Future[Opening]:
        return self._eyes.seen(self._session.reset(row, seed))

    def step(self, message: Message) -> Future[Reply]:
        return self._eyes.seen(self._session.step(message))

    def close(self) -> None:
        self._session.close()


def _settle(future: Future[Answer], result: Callable[[], Answer]) -> None:
    try:
        future.set_result(result())
    except EnvironmentFailed as error:
        future.set_exception(error)
    except Exception as error:  # a picture may be anything
        future.set_exception(EnvironmentFailed(Failure.PROTOCOL, f"it showed what cannot be seen: {error!r:.300}"))
