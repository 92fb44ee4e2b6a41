"""The recipe: everything a run is told, as typed fields.

One class a section, one field a key. A key that nothing reads does not belong here. Sizes carry their
unit and scope in the name. Free-form pass-through exists in exactly three places: `engine.megatron`,
`rollout.vllm` and `rollout.sglang`. This module imports without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from quintet.models.shape import LARGEST, MOST_LAYERS
from quintet.recipe.paths import expanded

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[int, Field(gt=0, le=1 << 20)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Timeout = Annotated[float, Field(gt=0, le=10**7)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(max_length=200)]
"""Of names of weights."""
UserPathText = Annotated[str, AfterValidator(expanded)]
"""A path where "~" is the home directory: no shell expands it inside a YAML file or after `key=`."""
UserPath = Annotated[Path, AfterValidator(lambda path: Path(expanded(str(path))))]


def _absolute(spec: str) -> str:
    place, colon, name = spec.rpartition(":")
    return f"{Path(expanded(place)).absolute()}:{name}" if colon and place.endswith(".py") else spec


UserCode = Annotated[str, AfterValidator(_absolute)]
"""module:name or file.py:name; a file by its absolute path, so that every process of a run finds it."""


class Section(BaseModel):
    """A recipe section: unknown keys are errors, and so are infinite numbers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    name: str = "run"
    """Name of the run; its directory is `dir/name-<time>`."""
    dir: UserPath = Path("runs")
    """Where run directories are made."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seeds data order, initial weights and sampling noise."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides metrics.jsonl."""
    samples_logged_per_step: NonNegativeInt = 4
    """Samples written to samples.jsonl each step."""


class Cluster(Section):
    address: str | None = None
    """Ray address of an existing cluster; null starts a local one."""
    ray_auth: Literal["token", "none"] = "token"
    """What Ray asks of whoever connects: a token, made anew for a local Ray, and of an existing cluster found where Ray looks for it
    (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token); or nothing."""
    ranks: Ranks = 1
    """Worker processes; one device each. The product of the layout's sizes must divide it."""
    ranks_per_node: Ranks | None = None
    """Ranks on one node; null packs them on as few nodes as hold them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    collective_timeout_s: Timeout = 600.0
    """A collective that waits longer ends the run with the stacks of all ranks."""


class BuildModel(Section):
    """A model made from nothing, for laptops and speed tests: a Qwen3-shaped decoder with random weights."""

    layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 4
    hidden_size: Annotated[int, Field(gt=0, le=1 << 18)] = 128
    ffn_hidden_size: Annotated[int, Field(gt=0, le=1 << 20)] = 384
    heads: Annotated[int, Field(gt=0, le=1 << 12)] = 4
    kv_heads: Annotated[int, Field(gt=0, le=1 << 12)] = 2
    head_dim: Annotated[int, Field(gt=0, le=1 << 12)] = 32
    tied_embeddings: bool = True
    max_position_embeddings: PositiveInt = 4096


class Model(Section):
    path: UserPath | None = None
    """Hugging Face directory: config.json, *.safetensors, tokenizer files."""
    family: UserCode | None = None
    """A model family of your own, module:Class or file.py:Class, that config.json's architecture names (docs/models.md)."""
    build: BuildModel | None = None
    """Make a model and a character tokenizer from nothing instead of reading `path`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Compute and parameter type; null is bf16 on GPU (fp32 master weights) and fp32 on CPU."""
    chat_template: str | None = None
    """Jinja text or a file; null takes the tokenizer's own."""
    trust_remote_code: bool = False
    """Run code that `path` brings along (auto_map in its JSON files), in every process of the run. Read it first."""


class Layout(Section):
    """Sizes of the mesh axes. dp is what is left: ranks / (tp * pp * cp). Experts have axes of their own over the
    same ranks of a stage: etp, ep, and expert dp, which is what is left: ranks / (etp * ep * pp)."""

    tp: Ranks = 1
    """Tensor parallel: every matrix is cut, between heads and across the MLP. Divides heads, KV heads and MLP width."""
    sp: bool = False
    """Sequence parallel: activations between the matrices are cut over the tp ranks. Needs tp > 1; experts need it then."""
    pp: Ranks = 1
    """Pipeline parallel: stages of equally many layers."""
    vpp: Ranks = 1
    """Virtual pipeline stages (model chunks) a rank: the interleaved schedule. Needs pp > 1; pp * vpp divides the layers."""
    cp: Ranks = 1
    """Context parallel: each sample's tokens are spread over cp ranks, which share a micro-batch of cp times the budget."""
    ep: Ranks = 1
    """Expert parallel: the experts of a layer are spread over ep of the stage's ranks. Divides the experts."""
    etp: Ranks | None = None
    """Expert tensor parallel: each expert is cut over etp ranks; null is tp. 1 keeps experts whole; needs ep > 1 to differ
    from tp."""


class Lora(Section):
    """Low-rank adapters: the model is frozen, and what is trained is a pair of small matrices beside each chosen linear
    layer (https://arxiv.org/abs/2106.09685)."""

    rank: Annotated[int, Field(gt=0, le=1 << 16)] | None = None
    """Of A and B; null is that of lora.path, otherwise 16."""
    alpha: PositiveFloat | None = None
    """Adapters are scaled by alpha / rank; null is that of lora.path, otherwise twice the rank."""
    targets: Literal["all-linear"] | Annotated[list[Pattern], Field(min_length=1, max_length=100)] | None = (
        None
    )
    """Linear layers with adapters: ends of Hugging Face module names such as q_proj, "*" being any text. all-linear is every one
    but embedding, router and head; null is those of lora.path, otherwise all-linear."""
    rslora: bool | None = None
    """Scale by alpha / √rank instead (https://arxiv.org/abs/2312.03732); null is as in lora.path, otherwise false."""
    path: UserPath | None = None
    """Adapters to start from: a directory that peft, or a run's adapter/, wrote for this model. null draws fresh ones."""


class Optimizer(Section):
    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """adamw decouples weight decay from the gradient, adam adds it to the gradient (L2)."""
    lr: PositiveFloat = 1e-6
    lr_multipliers: Annotated[dict[Pattern, PositiveFloat], Field(max_length=100)] = {}
    """Factor on lr by parameter: a pattern of Hugging Face names such as "*.gate.weight" → factor; the first match counts."""
    beta1: Beta = 0.9
    beta2: Beta = 0.98
    eps: PositiveFloat = 1e-8
    momentum: Beta = 0.9
    """Of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; norms and biases have none."""
    cpu_fraction: Fraction = 0.0
    """Share of the optimizer's state that lives on the CPU and is updated there (adamw in bf16, on GPUs)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null leaves them."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    """cosine: steps from the end of warmup to the minimum (null: to the end of the run). wsd: length of the final decay."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of lr."""


class Engine(Section):
    tokens_per_microbatch_per_rank: PositiveInt = 8192
    """Hard token budget of a packed micro-batch on one rank, padding included. The longest sample fits into cp times it."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over dp and cp."""
    backend: Literal["auto", "portable", "transformer_engine"] = "auto"
    """Layers: portable needs torch and megatron-core alone; auto takes TransformerEngine on GPUs where it is installed."""
    cp_comm: Literal["all_gather", "all_to_all"] = "all_gather"
    """How context-parallel ranks share attention: keys and values gathered, or heads exchanged (cp * tp then divides the
    KV heads, with latent attention the heads)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: of no, of some (`recompute_modules`), or of every layer."""
    recompute_modules: (
        list[Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]]
        | None
    ) = None
    """What recompute=selective computes again, in megatron-core's names; null takes what the model has of mlp, moe_act,
    shared_experts and mla_up_proj."""
    offload_params: Fraction = 0.0
    """Share of the parameters on the CPU while generating; needs a rollout.layout, whose weights are its own."""
    offload_grads: Fraction = 0.0
    """Share of the gradient buffers given back while generating."""
    offload_optimizer: Fraction = 0.0
    """Share of the optimizer's state on the CPU while generating."""
    megatron: dict[str, Any] = {}
    """Further TransformerConfig fields of megatron-core, as they are named there: those that no other key decides and that
    quintet's layers read (docs/layouts.md lists them)."""


class RolloutLayout(Section):
    tp: Ranks = 1
    """Tensor parallel. Divides heads, KV heads and MLP width; with vllm and sglang it may also be a multiple of the KV heads."""
    pp: Ranks = 1
    """Pipeline parallel."""
    ep: Ranks = 1
    """Expert parallel."""


class Rollout(Section):
    backend: Literal["native", "vllm", "sglang"] = "native"
    mode: Literal["offline", "server"] = "offline"
    """Of vllm: offline answers a step's requests together, server takes them one by one (its asynchronous engine)."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated generates on the devices that train, which change hands between the phases; separate on `ranks` of its own."""
    ranks: Ranks | None = None
    """Devices of a separate rollout."""
    own_processes: bool = False
    """Native colocated rollouts in processes of their own, as vllm and sglang always are; false runs them in the trainer's."""
    restart: bool = False
    """Start a rollout process that died anew, bring it the weights, and generate again what it owed; false ends the run."""
    sleep_level: Literal[1, 2] = 2
    """What a colocated rollout does with its weights while training: 1 keeps a copy in host memory, 2 forgets them until the
    next sync."""
    bucket_mib: PositiveInt = 256
    """Weights travel in buckets of this size; two at most are in memory at once."""
    sync_proof: bool = True
    """Compare fingerprints of the rollout's live weights with the engine's after each sync."""
    adapter_sync: Literal["merged", "separate"] | None = None
    """Of vllm, with lora: merged sends the weights with the adapters in them; separate has vLLM read the frozen weights from
    the model's directory and compute the adapters beside them, which alone are sent. null is merged. Native rollouts always get
    adapters alone, sglang always merged weights."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference of log-probs on fixed tokens where weights cannot be read back; null is 0.002 in fp32; in bf16 0.25,
    with experts 1; with rollout.quantization 1."""
    quantization: Literal["fp8"] | None = None
    """fp8: the rollout's matrices in 8 bits with a scale for each block of 128 × 128 (vllm on GPUs)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a device's memory for weights and KV cache of vllm or sglang."""
    return_routes: bool = False
    """Samples tell the experts that each token was sent to (mixture-of-experts models)."""
    layout: RolloutLayout | None = None
    """null is, of a native rollout in the trainer's processes, the training layout: it then reads the engine's own parameters,
    which works without cp, ep, etp and vpp; of any other, one device a copy. Another layout is resharded after each step."""
    samples_per_prompt: PositiveInt = 8
    max_response_tokens: PositiveInt = 512
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps every token."""
    min_p: Fraction = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[NonNegativeInt] = []
    """Besides the tokenizer's end-of-sequence token."""
    sequences_per_rank: PositiveInt = 256
    """Most sequences decoded at once on one rank; also the KV cache's slots."""
    vllm: dict[str, Any] = {}
    sglang: dict[str, Any] = {}


class Mismatch(Section):
    """How far rollout and trainer may part in the log-probs of the same tokens: see docs/mismatch.md."""

    token_threshold: PositiveFloat = 0.5
    """|Δ log-prob| above which a token counts as over the threshold (metric mismatch/over_threshold)."""
    stop_above_kl: PositiveFloat | None = None
    """Stop the run when the KL (k3) of rollout to trainer over a step's tokens is above this; null never does."""
    replay_samples_per_step: NonNegativeInt = 4
    """Samples kept with tokens and log-probs, below replay/ of the run directory, for `quintet diagnose mismatch`."""


class Data(Section):
    task: Literal["addition", "countdown", "gsm8k", "jsonl"] = "jsonl"
    """Built-in synthetic task (no files), or the shape of the files under train_path and eval_path."""
    train_path: UserPathText | None = None
    """jsonl or parquet file, directory saved by `datasets`, or hub name."""
    eval_path: UserPathText | None = None
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages. "question" unless named when task is gsm8k."""
    answer_key: str = "answer"
    response_key: str = "response"
    """Column with the response to imitate (sft)."""
    system_prompt: str | None = None
    chat: bool = True
    """Render prompts with the chat template; false feeds the text as it is."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is an error naming its file and line."""
    shuffle: bool = True
    task_options: dict[str, int] = {}
    """Options of a synthetic task, such as digits."""

    @model_validator(mode="after")
    def _columns_of_gsm8k(self) -> Self:
        # Written into the field, so that the resolved recipe says it and reads back to the same.
        if self.task == "gsm8k" and "prompt_key" not in self.model_fields_set:
            self.prompt_key = "question"
        return self


BUILT_IN_REWARDS = ("math", "gsm8k", "exact_match", "length", "addition", "countdown")
"""A built-in task's own reward has its name."""


class Reward(Section):
    function: str = "math"
    """One of BUILT_IN_REWARDS, or a user's own `file.py:function`, or `module:function` of a module that is installed or on
    PYTHONPATH. math gives a response 0.2 s of processor time, and then 0 (metric reward/timed_out)."""
    overlong_tokens: PositiveInt | None = None
    """The last tokens before rollout.max_response_tokens in which a response loses reward, ever more up to overlong_penalty (DAPO's
    soft overlong punishment); null takes nothing off."""
    overlong_penalty: PositiveFloat = 1.0
    timeout_s: Timeout = 60.0
    """Longest that one sample may take to be scored; then its process is replaced, and reward.on_error decides."""
    step_timeout_s: Timeout = 600.0
    """Longest that a step waits for its rewards when all its responses are there; reward.on_error decides about those missing."""
    on_error: Literal["stop", "zero"] = "stop"
    """When a sample cannot be scored (the function raises, returns no finite number, takes too long, or its process dies): stop
    ends the run with the sample, zero counts it as 0 (metric reward/failed)."""


class Algorithm(Section):
    name: Literal["grpo", "dapo", "ppo"] = "grpo"
    """grpo compares the samples of a group; dapo does so with groups that carry a signal alone, and generates more in place of the
    others (dynamic sampling); ppo compares each token with what a critic expected. See docs/algorithms.md."""
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Clip-higher (DAPO): the ratio stays within [1 - clip_low, 1 + clip_high]."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How per-token losses become one number: over all tokens of the mini-batch, or within each sample first."""
    normalize_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference policy (the weights RL starts from); 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: as a term of the policy's loss, or (ppo) taken off each token's reward."""
    max_refills: PositiveInt = 3
    """Of dapo: how often a step generates as many prompts again as it lacks groups with a signal, at most."""
    gamma: Fraction = 1.0
    """Of ppo: discount of a token's reward, per token after it."""
    gae_lambda: Fraction = 0.95
    """Of ppo: discount of longer estimates of an advantage (generalized advantage estimation)."""


class Reference(Section):
    """The reference policy: the weights RL starts from."""

    layout: Layout | None = None
    """null is the policy's. Over the same ranks."""


class Critic(Section):
    """The value model of ppo."""

    path: UserPath | None = None
    """Hugging Face directory to start from; null starts from the policy as RL begins. A head that it lacks starts at zero."""
    layout: Layout | None = None
    """null is the policy's. Over the same ranks."""
    optimizer: Optimizer | None = None
    """null is the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the beginning in which the critic learns alone."""
    value_clip: PositiveFloat | None = 0.2
    """Farthest that a value may move from what it was before the step and still be followed; null clips nothing."""


class Train(Section):
    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 64
    mini_batches_per_step: PositiveInt = 1
    """Optimizer steps on the samples of one step."""
    eval_every_steps: NonNegativeInt = 0
    """0 evaluates before the first and after the last step only."""
    eval_prompts: NonNegativeInt = 256
    """Held-out prompts of one evaluation; 0 evaluates none."""
    eval_samples_per_prompt: PositiveInt = 8


class SftOptimizer(Optimizer):
    """The optimizer of SFT: a class of its own, so that naming one key leaves the default of `lr` alone."""

    lr: PositiveFloat = 1e-5


class Sft(Section):
    """Supervised fine-tuning: the whole of `quintet sft`, or the warm-up before `quintet train`."""

    steps: PositiveInt = 100
    samples_per_step: PositiveInt = 64
    stop_at_loss: PositiveFloat | None = None
    """End early once the loss, averaged over about ten steps, is below this; null takes all steps."""
    optimizer: SftOptimizer = SftOptimizer()


class Checkpoint(Section):
    """Saves of the whole state of training, from which a run goes on: see docs/checkpoints.md."""

    every_steps: NonNegativeInt = 0
    """Save after so many steps of SFT and of RL, and after the last; 0 saves nothing to resume from."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; an older one is removed once a newer one is whole."""
    async_save: bool = True
    """Write while the next steps go on, from a copy in host memory; false waits for the disk."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a failed save (a full disk) does to the run."""
    hf_every_steps: NonNegativeInt = 0
    """Write the model as a Hugging Face directory after so many steps, under hf/ of the run directory; all are kept. The
    trained model is written at the end in any case."""


class Recipe(Section):
    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model = Model()
    layout: Layout = Layout()
    engine: Engine = Engine()
    lora: Lora | None = None
    """Train low-rank adapters instead of the model when present."""
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
