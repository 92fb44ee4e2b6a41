"""quintet's side of the laptop's and the step benchmark: the outer loop's own verbs, on Ray workers, one a core or GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.laptop_cases import Case
from benchmarks.records import ROOT, versions
from quintet.algorithms.advantages import Advantages, group_advantages
from quintet.cluster.cluster import Cluster
from quintet.controller.controller import Controller
from quintet.controller.objective import policy_objective
from quintet.data.prompts import make_prompts
from quintet.data.tokenizer import load_tokenizer
from quintet.models import read_shape
from quintet.observe.phases import PhaseTimer
from quintet.recipe import schema
from quintet.rewards.load import load_reward
from quintet.rewards.pool import RewardPool
from quintet.rollout.base import Sampling


def recipe(model: Path, cores: int, longest: int) -> schema.Recipe:
    """The same algorithm as TRL's side: GRPO, clip-higher, token mean, no KL, one optimizer step a generation."""
    return schema.Recipe(
        cluster=schema.Cluster(ranks=cores, device="cpu"),
        model=schema.Model(path=model, dtype="fp32"),
        data=schema.Data(chat=False),
        engine=schema.Engine(tokens_per_microbatch_per_rank=8192),
        rollout=schema.Rollout(max_response_tokens=longest, sequences_per_rank=512),
        optimizer=schema.Optimizer(lr=1e-4),
    )


def run_quintet(case: Case, model: Path, cores: int) -> dict[str, Any]:
    """One run of the case; see `benchmarks.laptop_grpo.Result`."""
    return run_steps(recipe(model, cores, case.longest), case.work())


def run_steps(
    settings: schema.Recipe, work: dict[str, Any], tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Train for the work's steps (`Case.work`); return seconds by step (warm-up left out) and their summary. controller_share: of a
    step, what the controller takes to plan and scatter it, and what is in no phase. first_step_at: Unix time. tell: is told how long the
    start and each step took."""
    called = time.perf_counter()
    model = settings.model.path
    tokenizer = load_tokenizer(model)
    texts, lengths, per_prompt = work["prompts"], work["lengths"], work["samples_per_prompt"]
    prompts = make_prompts(texts, settings.data, tokenizer)
    per_step = len(texts) // len(lengths)
    reward = load_reward(f"{ROOT / 'benchmarks' / 'laptop_cases.py'}:reward")
    sampling = Sampling(max_response_tokens=work["longest"], ignore_end=True)
    objective = policy_objective(settings.algorithm, settings.mismatch)
    advantages = Advantages(partial(group_advantages, normalize_by_std=True))
    steps: list[tuple[float, float, float, float]] = []
    timed = PhaseTimer()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(settings.cluster))
        pool = stack.enter_context(RewardPool(reward, settings.reward, cluster.log_dir))
        controller = Controller(cluster, settings, model, read_shape(model), phase=timed, rewards=pool)
        policy = controller.policy
        first_step_at = time.time()
        tell(f"started in {time.perf_counter() - called:.1f} s")
        for step, wanted in enumerate(lengths):
            chosen = prompts[step * per_step : (step + 1) * per_step]
            by_prompt = [wanted[i : i + per_prompt] for i in range(0, len(wanted), per_prompt)]
            began = time.perf_counter()
            timed.lap()
            with timed("generate"), controller.generating():
                samples = controller.generate(chosen, sampling, per_prompt, f"bench/{step}", by_prompt)
            generated = time.perf_counter()
            with timed("reward"):
                controller.reward(samples)
            batch = controller.scatter(samples)
            batch = batch | policy.advantages(batch, advantages)
            for mini in batch.minibatches:
                policy.forward_backward(mini, objective)
                policy.optimizer_step()
            policy.publish()
            ended = time.perf_counter()
            phases, whole = timed.lap()
            tell(f"step {step + 1}: {ended - began:.2f} s, of which {generated - began:.2f} generate")
            if [g.response_tokens for g in samples.generated] != wanted:
                raise AssertionError("the responses do not have the lengths of the work")
            if step >= work["warmup_steps"]:
                alone = 1 - sum(phases.values()) / whole
                steps.append((ended - began, generated - began, ended - generated, alone))
    step_s, generate_s, train_s, shares = (list(column) for column in zip(*steps, strict=True))
    return {
        "step_s": step_s,
        "generate_s_median": statistics.median(generate_s),
        "train_s_median": statistics.median(train_s),
        "samples_per_s": len(lengths[0]) / statistics.median(step_s),
        "controller_share": statistics.median(shares),
        "first_step_at": first_step_at,
        "versions": versions(),
        "settings": {"ranks": settings.cluster.ranks},
    }
