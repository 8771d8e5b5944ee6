"""BFCL V3 multi-turn with real weights: real prompts of ~5,000 tokens, real tools, real verdicts.

    pip install --no-deps bfcl-eval==2026.3.23
    python -m seal_jax.main --config=configs/bfcl.py:qwen25_7b --workdir=runs/qwen25_7b

| backbone          | weights                                    | where it runs                      |
|-------------------|--------------------------------------------|------------------------------------|
| smollm2_135m      | a SmolLM2-135M-Instruct GGUF (policy.path) | CPU: a plumbing check, scores ~0   |
| qwen25_coder_0p5b | Qwen/Qwen2.5-Coder-0.5B-Instruct or GGUF   | CPU: strict evaluation of 20 tasks |
| qwen25_3b         | Qwen/Qwen2.5-3B-Instruct                   | accelerators (paper, Table 1)      |
| qwen25_7b         | Qwen/Qwen2.5-7B-Instruct                   | accelerators (paper, Table 1)      |
| toolace2_8b       | Team-ACE/ToolACE-2-Llama-3.1-8B            | accelerators (paper, Table 1)      |
| qwen25_0p5b_lora  | Qwen/Qwen2.5-0.5B-Instruct, adapters       | one TPU v5e chip of 16 GB (Colab)  |
| qwen25_1p5b_lora  | Qwen/Qwen2.5-1.5B-Instruct, adapters       | one TPU v5e chip of 16 GB (Colab)  |

Those of the paper's Table 1 carry its hyperparameters (Table 4); nobody has re-run its figures with this code. Nobody
has run the two with adapters (LoRA): their rank, learning rate and shorter episodes are our guesses. Cues are the
paper's, inline and on every row; what helped a small policy most (experiments/RESULTS.md) is
--config.interface.placement=note --config.interface.exposure=0.5 --config.interface.strip_in_update=True

Every result names its protocol. "seal", in training always: a malformed call gets a reply and another try, a tool that
is not offered is rejected, 20 steps an episode, prompts of up to 8,192 tokens, 16,384 in all. "official": bfcl-eval's
own loop, prompts, decoders and limits (seal_jax/chat/official_formats.py, rollout/episode.py), within these buckets and
max_new_tokens; `eval/<split>_official/context_limit` is the share of its episodes that larger ones might help.
"""

from ml_collections import ConfigDict

from seal_jax.config import default_config

HUB = {
    "qwen25_coder_0p5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen25_3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen25_7b": "Qwen/Qwen2.5-7B-Instruct",
    "toolace2_8b": "Team-ACE/ToolACE-2-Llama-3.1-8B",
    "qwen25_0p5b_lora": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen25_1p5b_lora": "Qwen/Qwen2.5-1.5B-Instruct",
}
BACKBONES = ("smollm2_135m", *HUB)


def get_config(backbone: str = "qwen25_7b") -> ConfigDict:
    if backbone not in BACKBONES:
        raise ValueError(f"configs/bfcl.py:{backbone} is not known; choose one of {sorted(BACKBONES)}")
    c = paper()
    if backbone == "smollm2_135m":
        return on_a_cpu(c)
    c.policy.path = HUB[backbone]
    if backbone == "qwen25_coder_0p5b":
        c = on_a_cpu(c)
        c.policy.source, c.policy.path = "hf", HUB[backbone]
        c.rounds = 0
        c.eval.test = 20
        c.eval.category = "base"
        # Nothing is trained, so there is room for whole episodes.
        c.limits.max_new_tokens, c.limits.max_steps, c.limits.max_observation_tokens = 256, 20, 1000
        c.buckets.suffix, c.buckets.chunk, c.buckets.groups = (1024, 2048, 4096), (64, 256, 1024), (4,)
        c.buckets.act_in_last = False
    elif backbone.endswith("_lora"):
        c = on_one_chip(c)
    elif backbone == "qwen25_3b":
        c.tasks_per_round = 16
    elif backbone == "toolace2_8b":
        c.chat = "toolace"
        c.buckets.prompt = (6144, 8192, 12288)
        c.limits.retry_malformed = False
    return c


def paper() -> ConfigDict:
    """The paper's Table 4: batch 32 x 8, 72 rounds, lr 1e-6, KL 0.001, 16,384 tokens of context."""
    c = default_config()
    c.suite, c.chat = "bfcl", "hermes"
    # Your own splits: --config.suite_options.split_file=FILE.json (envs/bfcl/splits.py); "" = the paper's.
    c.suite_options.split_file, c.suite_options.allow_overlap = "", False
    c.policy.source = "hf"
    c.policy.compute_dtype, c.policy.remat = "bfloat16", "block"
    c.mesh = ConfigDict({"data": 1, "fsdp": -1, "tensor": 1})
    c.rounds, c.tasks_per_round, c.rollouts = 72, 32, 8
    c.interface.exposure, c.interface.placement = 1.0, "inline"
    c.interface.feedback = "classed"
    c.buckets.prompt = (4096, 6144, 8192)
    c.buckets.suffix = (1024, 2048, 4096, 8192)
    c.buckets.chunk = (64, 256, 1024, 4096)
    # Groups are split over the devices: these fit 1, 2, 4 or 8 of them. With fewer than 8, less memory is needed when
    # prompts_per_micro is the number of devices. (A mini-batch of fewer prompts is filled up with empty ones.)
    c.buckets.groups = (8, 16)
    c.learner.prompts_per_micro = 8
    c.limits.max_new_tokens = 4096
    c.limits.max_steps_per_turn, c.limits.max_steps = 20, 20
    c.limits.max_observation_tokens = 3996
    # Selected on val-100, reported on test-300 and (with the selecting tasks, as the paper does) eval-400.
    c.eval.every, c.eval.val, c.eval.test, c.eval.eval = 10, -1, -1, -1
    c.eval.protocols = ("seal", "official")
    return c


def on_one_chip(c: ConfigDict) -> ConfigDict:
    """Adapters on a frozen base in bfloat16, small rounds, shorter episodes. Only val and a part of test are played."""
    c.policy.lora_rank, c.policy.lora_alpha = 32, 32.0
    c.optimizer.learning_rate = 2e-5  # adapters take a higher rate than whole weights (1e-6 in the paper)
    c.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})
    c.rounds, c.tasks_per_round = 40, 8
    c.learner.prompts_per_micro = 1
    c.buckets.suffix, c.buckets.chunk, c.buckets.groups = (1024, 2048), (64, 256, 1024), (1, 2)
    c.limits.max_new_tokens, c.limits.max_observation_tokens = 512, 1000
    c.eval.every, c.eval.val, c.eval.test, c.eval.eval = 10, 40, 100, 0
    c.eval.protocols = ("seal",)
    return c


def on_a_cpu(c: ConfigDict) -> ConfigDict:
    """Two rounds of the whole loop on a few tasks: every part is real, the scale is not."""
    c.policy.source = "gguf"  # --config.policy.path=FILE.gguf
    c.policy.compute_dtype = "float32"
    c.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})
    c.rounds, c.tasks_per_round, c.rollouts = 2, 2, 4
    c.learner.minibatches, c.learner.prompts_per_micro = 1, 1
    # A bucket compiles when it is first met, in less time than one step spends on the padding of the next larger one.
    c.buckets.prompt, c.buckets.suffix, c.buckets.chunk = (4096, 6144, 8192), (512, 1024), (64, 512)
    c.buckets.groups, c.buckets.act_in_last = (2,), True
    c.limits.max_new_tokens = 64
    c.limits.max_steps = 6
    c.limits.max_observation_tokens = 448
    c.eval.every, c.eval.val, c.eval.test, c.eval.eval = 0, 0, 2, 0
    c.eval.protocols = ("seal",)  # every protocol plays the split anew
    c.checkpoint.every = 1
    return c
