"""Sessions whose images are preprocessed for the model, in a separate thread: no call's deadline includes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from rlcli.environments.chat_messages import Message
from rlcli.environments.environment import EnvironmentFailed, Failure, Opening, Reply
from rlcli.environments.environment_host import Session
from rlcli.images.image_processor import ImageProcessor, NoRoom
from rlcli.images.row_images import BadImage

Answer = TypeVar("Answer", Opening, Reply)


class SessionImages:
    """Preprocesses the images of environments' answers."""

    def __init__(self, image_processor: ImageProcessor | None, max_tokens: int) -> None:
        self.image_processor = image_processor
        """Image processor, for a model that takes images."""
        self._max_tokens = max_tokens  # of the images in one answer
        self._thread = ThreadPoolExecutor(1, "images")

    def session(self, session: Session) -> ImageSession:
        """Wrap a session."""
        return ImageSession(session, self)

    def preprocess(self, answer: Future[Answer]) -> Future[Answer]:
        """The answer with preprocessed images, and small copies in place of the encoded ones."""
        result: Future[Answer] = Future()

        def process(done: Answer) -> None:
            _set_result(result, lambda: self._preprocessed(done))

        def on_answer(done: Future[Answer]) -> None:
            if done.exception() is not None or not done.result().images:
                _set_result(result, done.result)
                return
            try:
                self._thread.submit(process, done.result())
            except RuntimeError:  # it is shut down
                result.set_exception(EnvironmentFailed(Failure.DIED, "its run ends"))

        answer.add_done_callback(on_answer)
        return result

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _preprocessed(self, answer: Answer) -> Answer:
        if self.image_processor is None:
            raise EnvironmentFailed(Failure.PROTOCOL, "it showed an image, and the model reads text alone")
        try:
            processed = self.image_processor.process_with_copies(answer.images, self._max_tokens)
        except NoRoom:
            return replace(answer, images=(), fits=False)
        except BadImage as error:
            if isinstance(answer, Reply) and answer.done:  # the model does not get it
                return replace(answer, images=())
            raise EnvironmentFailed(Failure.PROTOCOL, f"it returned what is no usable image: {error}") from error
        return replace(answer, images=(), processed_images=processed.images, copies=processed.copies)


class ImageSession:
    """A `Session` whose answers have preprocessed images."""

    def __init__(self, session: Session, images: SessionImages) -> None:
        self._session, self._images = session, images

    def reset(self, row: Mapping[str, object], seed: int) -> Future[Opening]:
        return self._images.preprocess(self._session.reset(row, seed))

    def step(self, message: Message) -> Future[Reply]:
        return self._images.preprocess(self._session.step(message))

    def close(self) -> None:
        self._session.close()


def _set_result(future: Future[Answer], result: Callable[[], Answer]) -> None:
    try:
        future.set_result(result())
    except EnvironmentFailed as error:
        future.set_exception(error)
    except Exception as error:  # an image may be anything
        future.set_exception(
            EnvironmentFailed(Failure.PROTOCOL, f"it returned what is no usable image: {error!r:.300}")
        )
