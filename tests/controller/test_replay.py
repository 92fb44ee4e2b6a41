"""Replay files: written and read back, and what cannot be read is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quintet.controller.messages import ReplayTokens, TrainedTokens
from quintet.controller.replay import pack, read, replay_file, replay_of
from quintet.controller.sample_store import SampleStore, trained_samples
from quintet.controller.samples import Kept, Samples
from quintet.data.batch import make_batch
from quintet.diagnose.mismatch import recorded_gaps
from quintet.errors import UserError
from quintet.rollout.base import Request, Sample, Sampling
from quintet.runs.directory import replays


def samples(routes: bool) -> Samples:
    """Three samples of two prompts, of which the keeper tells two with their tokens."""
    # Two of three layers, as vLLM's are cut: numpy lays them out with layers first.
    chosen = np.arange(2 * 3 * 2, dtype=np.int16).reshape(2, 3, 2)[:, [0, 2]] if routes else None
    if chosen is not None:
        chosen.flags.writeable = False  # as it comes out of Ray's object store
    keeper = SampleStore(2)
    requests = [Request([5, 6], 1), Request([7], 2)]
    answered = [
        [Sample([8], [-0.5], [-0.25], [-0.125], "stop", "é", chosen)],
        [Sample([9, 4], [-1.5, -1], [-1.25, -2], [0.0, 0.0], "length", "b", chosen)] * 2,
    ]
    keeper.put("call", requests, answered)
    told = [one for at, row in enumerate(answered) for one in keeper.info(requests, at, row)]
    prompts: list[Any] = [SimpleNamespace(text="p", answer=""), SimpleNamespace(text="q", answer="")]
    return Samples(prompts, [0, 1, 1], told, [Kept(0, "call", n) for n in range(3)], [])


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("routes", [False, True])
def test_what_is_written_is_read_back(tmp_path: Path, routes: bool) -> None:
    made = samples(routes)
    assert [one.kept is not None for one in made.generated] == [True, True, False]
    trained = {
        0: TrainedTokens([5, 6, 8], 2, [-0.25], [-0.375]),
        1: TrainedTokens([7, 9, 4], 1, [-1.25, -2], [-1.5, -2.5]),
    }
    sampling = Sampling(0.5, top_k=3, stop=("x",), stop_token_ids=(1, 2))
    replay = replay_of(12, sampling, made, trained)
    (tmp_path / "replay").mkdir()
    replay_file(tmp_path, 12).write_bytes(pack(replay))
    found = read(tmp_path / "replay" / "step-000012.safetensors")
    for one, other in zip(found.samples, replay.samples, strict=True):
        if routes:
            assert one.generated.routes is not None
            assert (one.generated.routes == other.generated.routes).all()
            assert one.generated.routes.dtype == np.int16
    bare = [
        replace(r, samples=[replace(s, generated=replace(s.generated, routes=None)) for s in r.samples])
        for r in (found, replay)
    ]
    assert bare[0] == bare[1]
    assert (found.step, found.weights, found.sampling) == (12, 11, sampling)
    assert found.samples[0].generated.ids == [5, 6, 8]
    assert found.samples[0].prompt == "p"


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.safetensors"
    with pytest.raises(UserError, match="is no replay file"):
        read(file)
    whole = pack(
        replay_of(1, Sampling(), samples(False), {0: TrainedTokens([5, 6, 8], 2, [-0.25], [-0.375])})
    )
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"step-000001\.safetensors is no replay file"):
        read(file)
    file.write_bytes(whole.replace(b"trained_ids", b"trained_idz"))
    with pytest.raises(UserError, match="trained_ids"):
        read(file)


def test_a_sample_is_told_with_its_own_tokens() -> None:
    """Micro-batches hold samples in any order; each token brings its sample."""
    batch = make_batch([[1, 2, 3], [4, 5, 6, 7]], [2, 1], rollout_logprobs=[[-1.0], [-2.0, -3.0, -4.0]])
    seen = [
        (torch.tensor([1, 1, 1]), torch.tensor([-0.2, -0.3, -0.4])),
        (torch.tensor([0]), torch.tensor([-0.1])),
    ]
    told = trained_samples(batch, {17: 0, 3: 1}, seen)
    assert told[17] == TrainedTokens([1, 2, 3], 2, [-1.0], pytest.approx([-0.1]))  # type: ignore[arg-type]
    assert told[3] == TrainedTokens([4, 5, 6, 7], 1, [-2.0, -3.0, -4.0], pytest.approx([-0.2, -0.3, -0.4]))  # type: ignore[arg-type]
    assert trained_samples(batch, {}, []) == {}
    assert isinstance(samples(False).generated[0].kept, ReplayTokens)


def test_gaps_of_every_step_are_told(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    for step, old in ((3, -0.5), (12, -1.25)):
        trained = {0: TrainedTokens([5, 6, 8], 2, [-0.25], [old])}
        replay_file(tmp_path, step).write_bytes(pack(replay_of(step, Sampling(), samples(False), trained)))
    replay_file(tmp_path, 4).write_bytes(b"")
    (tmp_path / "replay" / "step-copy.safetensors").touch()  # a user's own
    assert list(replays(tmp_path)) == [3, 4, 12]
    assert recorded_gaps(tmp_path) == {3: 0.25, 12: 1.0}
