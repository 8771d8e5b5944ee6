"""The toolbox with the parts of the method as an argument: one line changes one thing.

    python -m seal_jax.main --config=configs/toolbox.py:full --workdir=runs/full
    python -m seal_jax.main --config=configs/toolbox.py:vanilla --workdir=runs/vanilla

Settings: the five of the paper's Table 3, and two variants that a tiny policy can use.

| setting             | environment side        | reweighting    |
|---------------------|-------------------------|----------------|
| vanilla             | none                    | none           |
| no_environment      | none                    | paper          |
| no_reweighting      | cues on every row       | none           |
| no_closed_loop      | frozen after round 1    | paper          |
| full                | cues on every row       | paper          |
| half                | cues on half of a group | paper          |
| half_strip          | half, cues removed from trained successes | paper |
"""

from ml_collections import ConfigDict

from configs import quickstart

SETTINGS = {
    "vanilla": {"interface.exposure": 0.0, "loss.reweight": "none"},
    "no_environment": {"interface.exposure": 0.0, "loss.reweight": "paper"},
    "no_reweighting": {"interface.exposure": 1.0, "loss.reweight": "none"},
    "no_closed_loop": {"interface.exposure": 1.0, "loss.reweight": "paper", "interface.closed_loop": False},
    "full": {"interface.exposure": 1.0, "loss.reweight": "paper"},
    "half": {"interface.exposure": 0.5, "loss.reweight": "paper"},
    "half_strip": {"interface.exposure": 0.5, "loss.reweight": "paper", "interface.strip_in_update": True},
}


def get_config(setting: str = "full") -> ConfigDict:
    if setting not in SETTINGS:
        raise ValueError(f"configs/toolbox.py:{setting} is not known; choose one of {sorted(SETTINGS)}")
    c = quickstart.get_config()
    c.update_from_flattened_dict(SETTINGS[setting])
    return c
