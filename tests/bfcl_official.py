"""The package's own checker, made repeatable: for tests only.

It caches its instances in module globals by model name (mlcommons/endpoints 392), and lets default arguments and
module-level payloads be changed. Every check here runs under a name of its own, removes the instances that it left, and
puts the shared objects back.
"""

from __future__ import annotations

import copy
import decimal
import itertools
import os
import signal
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from seal_jax.envs.bfcl import package
from seal_jax.types import CATEGORIES, Call, Task

os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.gettempdir())  # some of its modules make folders there

NAMES = {
    "multi_turn:empty_turn_model_response": "empty_turn",
    "multi_turn:instance_state_mismatch": "state_mismatch",
    "multi_turn:execution_response_mismatch": "response_mismatch",
}
#: As long as "model", and without digits: a flight's price can depend on the digits in the name of the model.
_names = map("".join, itertools.product(string.ascii_lowercase, repeat=len("model")))


class Official:
    """`check(task, turns)` is the package's verdict in the words of `Verdict.reason`."""

    def __init__(self) -> None:
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
        from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context

        self.checker, self.utils = multi_turn_checker, multi_turn_utils
        self.rows = {}
        data = package.package_folder() / "data"
        for category in CATEGORIES:
            questions = package.read_json_lines(data / f"BFCL_v4_multi_turn_{category}.json")
            answers = package.read_json_lines(data / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json")
            for row, answer in zip(questions, answers, strict=True):
                self.rows[row["id"]] = (row, answer["ground_truth"])
        post_tweet = package.tool_class("TwitterAPI").post_tweet
        payloads = [v for name, v in vars(long_context).items() if name.isupper() and isinstance(v, dict | list)]
        self._shared = [(value, copy.deepcopy(value)) for value in (*post_tweet.__defaults__, *payloads)]

    def check(self, task: Task, turns: Sequence[Sequence[Sequence[Call]]], name: str = "") -> str:
        row, gold = self.rows[task.id]
        decoded = self.decoded(turns)
        if len(decoded) != len(gold):  # its caller's rule
            return "force_terminated"
        with self.namespace(name) as name:
            try:
                result = self.checker.multi_turn_checker(decoded, gold, row, task.category, name)
            except (Exception, TimeoutError) as error:  # it has no guard around a comparison that breaks off
                return f"broke off: {type(error).__name__}"
        return "valid" if result["valid"] else NAMES[result["error_type"]]

    def tags(self, task: Task, turns: Sequence[Sequence[Sequence[Call]]]) -> tuple[str, ...]:
        """The release's tags in a few lines of the package's own sub-checkers, on instances of their own."""
        row, gold = self.rows[task.id]
        decoded = [*self.decoded(turns), *([] for _ in gold)][: len(gold)]
        tags, history = [], []
        with self.namespace() as name:
            for t, (steps, program) in enumerate(zip(decoded, gold, strict=True)):
                policy = [self.execute(name, row, step) for step in steps] or [self.execute(name, row, [])]
                reference = self.execute(f"{name}_ground_truth", row, program)
                history += [text for texts, _ in policy for text in texts]
                if not program:
                    tags.append("spurious_tool_call" if steps else "correct_abstention")
                elif not steps:
                    tags.append("empty_turn_model_response")
                elif not self.checker.state_checker(policy[-1][1], reference[1])["valid"]:
                    tags.append("state_mismatch")
                elif not self.checker.response_checker(history, reference[0], t)["valid"]:
                    tags.append("response_mismatch")
                else:
                    tags.append("pass")
        return tuple(tags)

    def decoded(self, turns: Sequence[Sequence[Sequence[Call]]]) -> list[list[list[str]]]:
        """Calls as strings; undecodable and empty steps are dropped, as the checker's caller drops them."""
        return [[[str(call) for call in step] for step in turn if step] for turn in turns]

    def execute(self, name: str, row: dict, calls: Sequence[str]) -> tuple[list[str], dict]:
        return self.utils.execute_multi_turn_func_call(
            list(calls),
            row["initial_config"],
            row["involved_classes"],
            name,
            row["id"],
            long_context="long_context" in row["id"],
            is_evaL_run=True,
        )

    @contextmanager
    def namespace(self, name: str = "", limit_s: float = 20.0) -> Iterator[str]:
        """A fresh model name (or this one); afterwards all is as before. What runs too long gets a TimeoutError."""
        before = set(vars(self.utils))
        old = signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            with decimal.localcontext():
                yield name or next(_names)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
            for left in set(vars(self.utils)) - before:
                delattr(self.utils, left)
            for live, saved in self._shared:
                if live != saved:
                    live.clear()
                    (live.update if isinstance(live, dict) else live.extend)(copy.deepcopy(saved))


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError("the official checker ran too long")
