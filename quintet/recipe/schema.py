"""The recipe: everything a run is told, as typed fields.

One class a section (in sections/, by theme), one field a key. A key that nothing reads does not belong here. Sizes carry their
unit and scope in the name. Free-form pass-through exists in exactly three places: `engine.megatron`,
`rollout.vllm` and `rollout.sglang`. This module imports without torch.
"""

from __future__ import annotations

from quintet.recipe.sections.data import BUILT_IN_REWARDS, Data, Reward
from quintet.recipe.sections.fields import Section, UserPathText
from quintet.recipe.sections.model import BuildModel, Layout, Lora, Model, Mtp
from quintet.recipe.sections.rollout import Mismatch, Rollout, RolloutLayout
from quintet.recipe.sections.run import Checkpoint, Cluster, Run
from quintet.recipe.sections.training import (
    Algorithm,
    AuxLoss,
    Critic,
    CriticOptimizer,
    Engine,
    Optimizer,
    Reference,
    Sft,
    SftOptimizer,
    Train,
)

__all__ = [
    "BUILT_IN_REWARDS",
    "Algorithm",
    "AuxLoss",
    "BuildModel",
    "Checkpoint",
    "Cluster",
    "Critic",
    "CriticOptimizer",
    "Data",
    "Engine",
    "Layout",
    "Lora",
    "Mismatch",
    "Model",
    "Mtp",
    "Optimizer",
    "Recipe",
    "Reference",
    "Reward",
    "Rollout",
    "RolloutLayout",
    "Run",
    "Section",
    "Sft",
    "SftOptimizer",
    "Train",
]


class Recipe(Section):
    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model = Model()
    layout: Layout = Layout()
    engine: Engine = Engine()
    lora: Lora | None = None
    """Train low-rank adapters instead of the model when present."""
    mtp: Mtp | None = None
    """Keep a model's layers for multi-token prediction, and train them, when present."""
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    mismatch: Mismatch = Mismatch()
    data: Data = Data()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    reference: Reference = Reference()
    critic: Critic = Critic()
    train: Train = Train()
    sft: Sft | None = None
    """Under `quintet train`: a warm-up by SFT before RL when present."""
    checkpoint: Checkpoint = Checkpoint()
    resume: UserPathText | None = None
    """Go on with an earlier run: `auto` (the newest of run.name in run.dir that has a checkpoint, or a new one), a run
    directory, or one of its checkpoints."""
