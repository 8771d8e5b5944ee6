"""One run: its parts, its state, and its record on disk. `loop.py` says what happens; this says where it is kept."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from seal_jax import assembly, processes
from seal_jax.chat.formats import reasoning_rewrites
from seal_jax.chat.official import DECODER_OF_CHAT
from seal_jax.checkpoints import Checkpoints, check_workdir, drop_workdir, hold_workdir, write_config
from seal_jax.config import REPORTED
from seal_jax.data import task_batches
from seal_jax.diagnosis import TAG_TO_LABEL, Profile, count, release_labels
from seal_jax.evaluation.results import write_results
from seal_jax.evaluation.strict import Evaluation, result_name
from seal_jax.interface import Interface, InterfaceSettings, initial
from seal_jax.learner.batch import has_cues
from seal_jax.learner.utility import DynamicWeights, utility_vector
from seal_jax.policy.config import Params
from seal_jax.policy.hf import save_hf
from seal_jax.policy.local import LocalCopies, spans_processes
from seal_jax.provenance import describe, provenance
from seal_jax.rollout.collector import Collector
from seal_jax.telemetry import PhaseTimer, RunRecorder, peak_rss_mib
from seal_jax.telemetry.compare import compare
from seal_jax.telemetry.figures import draw
from seal_jax.telemetry.progress import Progress, closing_table
from seal_jax.telemetry.recorder import read_jsonl
from seal_jax.types import Diagnosis, Protocol, Trajectory, TurnLabel, Verdict

#: Settings that may change when a workdir is resumed: how long to run, what to evaluate, keep and log; and what changes
#: no result: on what mesh, in what portions and order.
FREE = (
    *("rounds", "eval", "checkpoint", "trajectories_logged"),
    *("mesh", "learner.prompts_per_micro", "overlap_environment"),
)

#: Of one round: [prompt][rollout].
Played = list[list[Trajectory]]
Judged = list[list[Verdict]]
Diagnosed = list[list[Diagnosis]]


class Run:
    """Builds everything from the config, restores the newest checkpoint, and writes the record.

    The state that changes from round to round, all of it in the checkpoint: the learner's parameters and optimiser,
    `round` (finished rounds), the position of `batches`, `interface` (Ω), `profile` (C), `weights` (dynamic ρ), and the
    outcomes of the evaluations before training.
    """

    def __init__(self, config: ConfigDict, workdir: Path):
        self.config, self.workdir = config, workdir
        assembly.check_settings(config)
        new = not workdir.exists()
        self._lock = hold_workdir(workdir)
        try:
            processes.agree("the config", config.to_dict())
            processes.check_shared(workdir)
            self._build(config, workdir)
        except BaseException:
            if new and processes.first():
                drop_workdir(workdir)
            self._lock.close()
            raise

    def _build(self, config: ConfigDict, workdir: Path) -> None:
        check_workdir(workdir, config.to_dict(), free=FREE)
        self.timer = PhaseTimer()
        self.checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
        saved = self.checkpoints.latest()
        self.round = 0 if saved is None else saved
        self.protocols: tuple[Protocol, ...] = tuple(config.eval.protocols)
        started = provenance(seed=config.seed, protocols=self.protocols, config=config.to_dict())
        logging.info("%s", describe(started))

        mesh = assembly.build_mesh(config)
        self.suite = assembly.build_suite(config)
        self.eval_tasks = {s: assembly.split_tasks(config, self.suite, s) for s in ("val", *REPORTED)}
        self.cued_tasks = assembly.cued_tasks(config, self.eval_tasks["test"])
        train_tasks = self.suite.tasks("train")
        self.batches = task_batches(
            train_tasks,
            config.tasks_per_round,
            config.seed,
            process_index=jax.process_index(),
            process_count=processes.count(),
        )
        policy = assembly.starting_policy(config, workdir, mesh, self.timer)
        self.policy_metrics = policy.metrics
        self._local = LocalCopies(mesh) if mesh is not None and spans_processes(mesh) else None
        playing = mesh if self._local is None else self._local.mesh
        self.collector = assembly.build_collector(config, policy, self.suite, playing, self.timer)
        self.evaluators: dict[Protocol, Collector] = {"seal": self.collector}
        if "official" in self.protocols:
            context = policy.config.max_position
            self.evaluators["official"] = assembly.official_collector(config, self.collector, context)
        evaluated = [t for tasks in self.eval_tasks.values() for t in tasks]
        played = [*(train_tasks if config.rounds else ()), *evaluated]
        with self.timer.phase("prompt check"):
            assembly.check_prompts(config, played, self.collector)
            if "official" in self.evaluators:
                assembly.check_prompts(config, evaluated, self.evaluators["official"])
        self.policy_config, self.tokenizer = policy.config, policy.tokenizer
        self.learner = assembly.build_learner(config, policy, mesh, turns=max(len(t.turns) for t in played))

        self.interface: Interface = initial(assembly.interface_settings(config))
        self.profile = Profile()
        self.weights = DynamicWeights(w_min=config.loss.w_min, w_max=config.loss.w_max)
        self.before: dict[str, dict[str, tuple[str, float]]] = {}
        self.after: dict[str, dict[str, tuple[str, float]]] = {}
        self._evaluated_by: dict[str, Protocol] = {}  # the reported results of this process -> their protocol
        self._score: float | None = None  # of this round's validation
        self.reported_round = self.round  # whose parameters the report evaluates; see take_best
        if saved is not None:
            self._restore()
        lost = list(read_jsonl(workdir / "metrics.jsonl")) if saved is None else []
        # The record is cut and the config rewritten only now: a start that fails leaves both as they were.
        self.recorder = RunRecorder(
            workdir,
            first_round=0 if saved is None else saved + 1,
            trajectories_per_round=config.trajectories_logged,
            enabled=processes.first(),
            wall=self.timer.wall,
        )
        self.recorder.provenance(started)
        write_config(workdir, config.to_dict())
        self.progress = Progress(
            config.rounds, title=f"SEAL on {config.suite}", mode="auto" if processes.first() else "off"
        )
        self.timer.on_phase = self.progress.phase
        if self.round:
            self.progress.message(f"resumed from {workdir} after round {self.round} of {config.rounds}")
        if lost:
            rounds = len({x.get("round") for x in lost if x.get("kind") == "train"})
            what = f"the records of {rounds} round{'' if rounds == 1 else 's'} are replaced"
            self.progress.message(f"no checkpoint in {workdir} yet: starting at round 0 ({what})")

    # --- the state -----------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Saves the round if it is due, was validated, or is the last one."""
        c = self.config
        due = self.round % c.checkpoint.every == 0 or self.round == c.rounds or self._score is not None
        if not due:
            return
        with self.timer.phase("checkpoint"):
            self.checkpoints.save(self.round, self.learner.state, self._host_state(), score=self._score)
        self._score = None

    def _host_state(self) -> dict[str, Any]:
        return {
            "batches": self.batches.get_state(),
            "interface": self.interface.to_dict(),
            "profile": self.profile.to_dict(),
            "weights": self.weights.to_dict(),
            "before": self.before,
            "timer": self.timer.state(),
            "base": self.learner.base_marks,
        }

    def _restore(self) -> None:
        self.learner.state, host = self.checkpoints.restore(self.learner.state)
        for name, mark in host.get("base", {}).items():  # adapters mean nothing on other weights
            if not np.isclose(self.learner.base_marks[name], mark, rtol=1e-3):
                raise ValueError(
                    f"config.policy.path={self.config.policy.path}: its {name} is not the one that the adapters in "
                    f"{self.workdir} were trained on; put the folder back as it was, or choose a new --workdir"
                )
        self.batches.set_state(host["batches"])
        self.interface = Interface.from_dict(host["interface"])
        self.profile = Profile.from_dict(host["profile"])
        self.weights = DynamicWeights.from_dict(host["weights"])
        self.before = {s: {k: (c, r) for k, (c, r) in o.items()} for s, o in host["before"].items()}
        self.timer.load(host["timer"])

    def take_best(self) -> None:
        """Puts the best validated round's parameters in place for the report; without validation the last ones stay."""
        best = self.checkpoints.best
        self.reported_round = self.round if best is None else best.round
        if best is not None and best.round != self.round:
            self.learner.state, _ = self.checkpoints.restore(self.learner.state, "best")
            self.progress.message(f"reporting round {best.round}, the best on validation ({best.score:.1%})")

    # --- what the loop asks ----------------------------------------------------------------------------------------
    def acting_params(self) -> Params:
        """The policy's parameters where this process plays; collective where there are several."""
        return self.learner.params if self._local is None else self._local(self.learner.params)

    def exchanged(self, groups: Played, verdicts: Judged, diagnoses: Diagnosed) -> tuple[Played, Judged, Diagnosed]:
        """The groups of all processes, in the order in which one would have played them; collective."""
        if processes.count() == 1:
            return groups, verdicts, diagnoses
        with self.timer.phase("exchange"):
            everyones = processes.exchange(list(zip(groups, verdicts, diagnoses, strict=True)))
        return [g for g, _, _ in everyones], [v for _, v, _ in everyones], [d for _, _, d in everyones]

    def exposure(self, t: int) -> float:
        """Share of each group's rows that sees the cues in round t = 1, 2, ..."""
        c = self.config.interface
        return c.exposure * max(0.0, 1.0 - (t - 1) / c.anneal_rounds) if c.anneal_rounds else c.exposure

    @property
    def shown_in_cued_evaluation(self) -> Interface:
        """The cues of config.eval.cued with all their components, as a note: the same for any Ω of training."""
        settings = assembly.interface_settings(self.config)
        whole = InterfaceSettings(max_tools=settings.max_tools, feedback=settings.feedback)
        return Interface(self.config.eval.cued, whole)

    def weighed_labels(
        self, verdicts: Sequence[Sequence[Verdict]], diagnoses: Sequence[Sequence[Diagnosis]]
    ) -> Sequence[Sequence[Diagnosis]]:
        """The labels that weigh the update: the diagnosis, or (release) the reference release's own tagging, or
        (shuffle_labels) the diagnoses of the round dealt out anew among the groups whose rewards differ."""
        if self.config.loss.shuffle_labels:
            teaches = [len({v.reward for v in group}) > 1 for group in verdicts]
            return shuffled(diagnoses, teaches, f"shuffle/{self.config.seed}/{self.round}")
        if self.config.loss.reweight != "release":
            return diagnoses
        return [
            [Diagnosis(tuple(TurnLabel(TAG_TO_LABEL[tag], tag) for tag in release_labels(v))) for v in group]
            for group in verdicts
        ]

    def utility(self, labels: Sequence[Sequence[Diagnosis]], rewards: Sequence[Sequence[float]]) -> np.ndarray:
        """ρ for this round's update, [Z] float32: static, or (release) moved by this round's labels first."""
        if self.config.loss.reweight != "release":
            return utility_vector(self.config.loss.utility.to_dict())
        if self.batches.opens_epoch:
            self.weights = self.weights.new_window()
        self.weights = self.weights.observe([d.names for g in labels for d in g], [r for g in rewards for r in g])
        return self.weights.vector()

    def profiled(
        self,
        groups: Sequence[Sequence[Trajectory]],
        diagnoses: Sequence[Sequence[Diagnosis]],
    ) -> Profile:
        """C_{t+1}, counted from bare rows whenever there are any: cued rows report mastery that is not there."""
        rows = [
            (d, x.category, x.cued)
            for group, labels in zip(groups, diagnoses, strict=True)
            for x, d in zip(group, labels, strict=True)
        ]
        bare = [r for r in rows if not r[2]]
        counted = count([r[0] for r in bare or rows], [r[1] for r in bare or rows])
        return self.profile.update(counted, self.config.interface.profile_rate, rows="bare" if bare else "cued")

    # --- the record --------------------------------------------------------------------------------------------------
    def record(
        self,
        interface: Interface,
        groups: Sequence[Sequence[Trajectory]],
        verdicts: Sequence[Sequence[Verdict]],
        diagnoses: Sequence[Sequence[Diagnosis]],
        learned: dict[str, float],
    ) -> None:
        """Everything about the round that just ended, under the names of `seal_jax.telemetry`."""
        evolved = {"interface": self.interface.to_dict(), "profile": self.profile.to_dict()}
        processes.agree(f"the interface or profile after round {self.round}", evolved)
        rows = [
            (x, v, d)
            for group, vs, ds in zip(groups, verdicts, diagnoses, strict=True)
            for x, v, d in zip(group, vs, ds, strict=True)
        ]
        values = round_metrics(rows) | learned
        values |= {f"profile/{k}": v for k, v in self.profile.latest_rates.items()}
        values |= {f"profile_ema/{k}": v for k, v in self.profile.rates.items()}
        values |= {f"time/{k}": v for k, v in self.timer.lap().items()}
        values |= self.collector.spent  # its last rollouts are this round's: validation comes after the record
        values |= {"count/compilations": self.compilations, "memory/peak_mib": peak_rss_mib()}
        seen = interface.active if any(x.cued for x, _, _ in rows) else ()
        self.recorder.record(self.round, values, cues=seen)
        self.recorder.interface(self.round, interface.describe(), self.profile.to_dict())
        self.recorder.trajectories(self.round, rows, decode=self.tokenizer.decode)
        self.progress.round(self.round, values, seen)

    def evaluating(self, split: str, protocol: Protocol, cued: bool = False) -> Callable[[int, int], None]:
        """Shows how far an evaluation is."""
        return functools.partial(self.progress.evaluating, result_name(split, protocol, cued))

    def validated(self, result: Evaluation) -> None:
        self._score = result.success
        self._record_evaluation(self.round, result, result.metrics(), "eval", result.name)

    def reported(self, when: str, result: Evaluation) -> None:
        evaluations = getattr(self, when)
        evaluations[result.name] = result.outcomes
        self._evaluated_by[result.name] = result.protocol
        values = result.metrics()
        if result.cued and result.split in evaluations:  # perhaps played with cues in part
            bare = evaluations[result.split]
            values[f"eval/{result.name}/success_bare"] = _mean({task: bare[task] for task in result.rewards})
        self._record_evaluation(self.reported_round, result, values, "report", f"report.{result.name}")
        if not result.cued:
            self._write_results(when, result)

    def _record_evaluation(
        self, round: int, result: Evaluation, values: dict[str, float], kind: str, rows_kind: str
    ) -> None:
        self.recorder.record(round, values, kind=kind, protocol=result.protocol)
        rows = list(zip(result.trajectories, result.verdicts, result.diagnoses, strict=True))
        self.recorder.trajectories(round, rows, kind=rows_kind, decode=self.tokenizer.decode)
        self.progress.evaluation(result.name, values, round, protocol=result.protocol)

    def _write_results(self, when: str, result: Evaluation) -> None:
        """The episodes as the benchmark's own package reads them, in workdir/results/<when>/<split>.<protocol>."""
        if self.suite.name != "bfcl" or self.config.chat not in DECODER_OF_CHAT or not self.recorder.enabled:
            return
        write_results(
            self.workdir / "results" / when / f"{result.split}.{result.protocol}",
            result.trajectories,
            decoder=DECODER_OF_CHAT[self.config.chat],
            protocol=result.protocol,
            split=result.split,
            round=self.reported_round if when == "after" else 0,
            success=result.success,
            success_by_category=result.by_category,
        )

    @property
    def compilations(self) -> int:
        """Programs compiled by the rollout engine and the learner so far in this process."""
        return self.collector.engine.compilations + sum(self.learner.compilations.values())

    def export(self) -> Path:
        """The policy as a Hugging Face folder in float32 (adapters merged) with its tokenizer: workdir/export."""
        folder = save_hf(self.workdir / "export", self.policy_config, self.learner.params, tokenizer=self.tokenizer)
        self.progress.message(f"the policy of round {self.reported_round}: {folder}")
        return folder

    def finish(self) -> dict[str, Any]:
        """Closes the display, draws the figures, writes and prints the summary."""
        self.progress.close()
        # eval.* may change on a resume; other tasks than before cannot be compared task by task.
        same = {s for s, after in self.after.items() if self.before.get(s, {}).keys() == after.keys()}
        comparisons = {s: compare(self.before[s], after) for s, after in self.after.items() if s in same}
        notes = [
            f"{s}: {_mean(after):.1%}; these tasks were not evaluated before training, so no difference is shown"
            for s, after in self.after.items()
            if s not in same
        ]
        if not self.after:
            notes += [f"{s}: {_mean(o):.1%} of {len(o)} tasks, the starting policy" for s, o in self.before.items()]
        best = self.checkpoints.best
        summary = {
            "round": self.round,
            "reported_round": self.reported_round,
            "validation": None if best is None else best.score,
            "evaluations": {s: _mean(o) for s, o in self.after.items()},
            "before": {s: _mean(o) for s, o in self.before.items()},
            "protocols": self._evaluated_by,
            "seconds": {"wall": self.timer.wall(), **self.timer.totals},
            "shares": self.timer.shares(),
            "compilations": self.compilations,
            "peak_mib": peak_rss_mib(),
            **self.policy_metrics,
        }
        figures = draw(self.workdir) if self.round and processes.first() else []
        self.recorder.summary(summary)  # the last file: with it, a run is done
        if not processes.first():
            return summary
        self.progress.console.print(
            closing_table(
                comparisons,
                protocols=self._evaluated_by,
                shares=self.timer.shares(),
                wall_s=self.timer.wall(),
                compilations=self.compilations,
                peak_mib=peak_rss_mib(),
                notes=notes + ([f"figures: {self.workdir / 'figures'}"] if figures else []),
            )
        )
        return summary

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.close()
        self.recorder.close()
        if not any(exc) or processes.count() == 1:  # else Orbax may wait for processes that are gone
            self.checkpoints.close()
        self._lock.close()


def round_metrics(rows: Sequence[tuple[Trajectory, Verdict, Diagnosis]]) -> dict[str, float]:
    """What a round's training rows were like; shares in 0..1, NaN where there are no such rows."""
    steps = [step for x, _, _ in rows for turn in x.turns for step in turn]

    def success(chosen: Sequence[tuple[Trajectory, Verdict, Diagnosis]]) -> float:
        return sum(v.reward for _, v, _ in chosen) / len(chosen) if chosen else float("nan")

    out = {"train/success": success(rows)}
    for category in sorted({x.category for x, _, _ in rows}):
        out[f"train/success/{category}"] = success([r for r in rows if r[0].category == category])
    out["train/success_bare"] = success([r for r in rows if not r[0].cued])
    out["train/success_cued"] = success([r for r in rows if r[0].cued])
    for name, chosen in (("bare", [r for r in rows if not r[0].cued]), ("cued", [r for r in rows if r[0].cued])):
        out[f"refused/{name}"], out[f"refused/{name}/repaired"] = refused_turns([v for _, v, _ in chosen])
        out[f"train/context_limit_{name}"] = stopped([x for x, _, _ in chosen], "context_limit")
    out["train/rows_with_cues"] = sum(has_cues(x) for x, _, _ in rows) / len(rows)
    out["train/truncated"] = stopped([x for x, _, _ in rows], "truncated")
    out["train/parse_errors"] = sum(s.error is not None for s in steps) / max(1, len(steps))
    kept = sum(reasoning_rewrites([[step.text for step in turn] for turn in x.turns]) for x, _, _ in rows)
    out["train/reasoning_kept"] = kept / len(rows)
    out["train/turns"] = sum(len(x.turns) for x, _, _ in rows) / len(rows)
    out["train/suffix_tokens"] = sum(len(x.suffix_ids) for x, _, _ in rows) / len(rows)
    out["train/sampled_tokens"] = float(sum(x.n_sampled for x, _, _ in rows))
    return out


def stopped(trajectories: Sequence[Trajectory], why: str) -> float:
    """The share of trajectories that ended for this reason; NaN where there is none."""
    return sum(x.stop == why for x in trajectories) / len(trajectories) if trajectories else float("nan")


def refused_turns(verdicts: Sequence[Verdict]) -> tuple[float, float]:
    """How many turns there were in which a tool refused a call and a call was asked for, and in how many of these the
    same call was made again, and taken."""
    met = []
    for turn in (turn for v in verdicts for turn in v.turns if not turn.abstain):
        results = [r for step in turn.steps for r in step.results]
        refused = [(i, r.call) for i, r in enumerate(results) if r.error == "tool_error"]
        if refused:
            met.append(any(r.ok and r.call == call for i, call in refused for r in results[i + 1 :]))
    return float(len(met)), float(sum(met))


def shuffled(groups: Sequence[Sequence[Diagnosis]], some: Sequence[bool], seed: str) -> list[Sequence[Diagnosis]]:
    """The diagnoses of `some` groups, dealt out anew over all their trajectories; the other groups as they are."""
    deck = [d for group, take in zip(groups, some, strict=True) if take for d in group]
    random.Random(seed).shuffle(deck)
    return [[deck.pop() for _ in group] if take else group for group, take in zip(groups, some, strict=True)]


def _mean(outcomes: dict[str, tuple[str, float]]) -> float:
    return sum(r for _, r in outcomes.values()) / len(outcomes)
