"""Renders conversations by a chat template, in a process with limits (`renderer`)."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from dataserver.assembly.chat.template import ChatTemplate
from dataserver.assembly.hugging_face import TokenizerError
from dataserver.dataset import TokenizingEndedError, TokenizingError, printable

CPU_S: Final = 5
"""CPU time of one conversation's renderings; most take a hundredth of a second."""
MEMORY_BYTES: Final = 512 << 20
DEADLINE_S: Final = 300.0
"""Time of one conversation's renderings, also on a machine that does much else: a process that was stopped is ended."""
MOST_ENDS: Final = 3
"""A template that the system ends for so many conversations, one after the other, is of no use for others."""
_PROGRAM: Final = Path(__file__).with_name("renderer.py")
_LINE_BYTES: Final = 1 << 28


class Renderer:
    """A template in a process of its own, which is started again where a conversation made the system end it."""

    def __init__(
        self, template: ChatTemplate, where: str, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """Name a template; nothing is started yet.

        Args:
            template: the template.
            where: what messages call it.
            cpu_s: CPU seconds for the renderings of a conversation.
            memory_bytes: memory of the process.
        """
        self._first = {"text": template.text, "text_for_tools": template.text_for_tools, "tokens": template.tokens}
        self._where = where
        self._limits = (cpu_s, memory_bytes)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_ended = 0

    def render(self, contexts: list[dict[str, Any]]) -> list[str]:
        """Return what the template makes of each context.

        Args:
            contexts: each with `messages`, `tools` and `add_generation_prompt`.

        Raises:
            TokenizingError: it refuses one.
            TokenizingEndedError: it takes too long for them, or too much memory.
            TokenizerError: it is of no use for any conversation; says why.
        """
        if self._process is None:
            self._start()
        answer = self._asked(contexts)
        if answer is None:
            self.close()
            self._num_ended += 1
            if self._num_ended >= MOST_ENDS:
                raise TokenizerError(
                    f"the chat template of {self._where} was ended {MOST_ENDS} times in a row: it takes more than "
                    f"{self._limits[0]} s of CPU time or {self._limits[1] >> 20} MiB for a conversation; use a "
                    "template that does not loop"
                )
            raise TokenizingEndedError(
                f"the chat template takes more than {self._limits[0]} s of CPU time or {self._limits[1] >> 20} MiB"
            )
        self._num_ended = 0
        if "exceeds" in answer:
            raise TokenizingEndedError(f"the chat template takes more than {self._limits[1] >> 20} MiB of memory")
        if "error" in answer:
            raise TokenizingError(f"the chat template refuses it ({answer['error']})")
        return [str(text) for text in answer["texts"]]

    def begin_batch(self) -> None:
        """Forget how many conversations made the system end the process: a batch gets the same wherever it is."""
        self._num_ended = 0

    def close(self) -> None:
        """End the process that renders, if one was started."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        import tempfile  # servers render nothing

        try:
            command = [sys.executable, "-I", str(_PROGRAM), *map(str, self._limits)]
            pipe = subprocess.PIPE
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self._process = process = subprocess.Popen(command, env={}, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            raise TokenizerError(f"cannot start the process that renders chat templates: {error}") from error
        weakref.finalize(self, _end, process)
        with errors:
            if self._within_deadline(self._answered) is None:
                self.close()
                raise TokenizerError(
                    f"the process that renders chat templates ended ({_last_line(errors)}); it needs jinja2: "
                    "pip install '.[server]'"
                )
        answer = self._asked(self._first)
        if answer is None or "texts" not in answer:
            self.close()
            limits = f"to compile it takes more than {self._limits[0]} s of CPU time or {self._limits[1] >> 20} MiB"
            reason = printable(answer["error"]) if answer is not None and "error" in answer else limits
            raise TokenizerError(f"the chat template of {self._where} cannot be used: {reason}")

    def _asked(self, line: Any) -> dict[str, Any] | None:
        """The answer to a line; None where the process ended."""
        return self._within_deadline(lambda: self._answer_to(json.dumps(line).encode() + b"\n"))

    def _within_deadline(self, ask: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What the process answers. One that somebody stopped uses no CPU time, so that nothing else would end it."""
        assert self._process is not None
        timer = threading.Timer(DEADLINE_S, self._process.kill)
        timer.start()
        try:
            return ask()
        finally:
            timer.cancel()

    def _answer_to(self, line: bytes) -> dict[str, Any] | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answered()

    def _answered(self) -> dict[str, Any] | None:
        """The next line that the process writes; None where it ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_LINE_BYTES)
        return json.loads(line) if line.endswith(b"\n") else None


def _last_line(errors: IO[bytes]) -> str:
    """The last line of what a process wrote to its standard error."""
    errors.seek(0)
    lines = errors.read(_LINE_BYTES).decode(errors="replace").split("\n")
    return printable(next((line for line in reversed(lines) if line.strip()), "it said nothing"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
