"""How cues come and go: thresholds per label, hysteresis, the cap, and the settings' checks."""

import random

import pytest

from seal_jax.diagnosis import Profile, count
from seal_jax.interface import BARE, Interface, InterfaceSettings, evolve, initial
from seal_jax.types import FAILURE_LABELS, LABEL_ID, LABELS, Call, CallResult, Diagnosis, TurnLabel


def profile(rate=1.0, turns=100, before=None, **labels):
    """A profile after one more round of `turns` turns with the given shares; the rest passed."""
    names = [name for name, share in labels.items() for _ in range(round(share * turns))]
    names += ["pass"] * (turns - len(names))
    return (before or Profile()).update(count([Diagnosis((TurnLabel(x),)) for x in names]), rate)


def run(settings, *rounds):
    """Applies Evolve round after round (rate 1: each round's own shares); yields the active labels."""
    interface, seen = initial(settings), []
    for shares in rounds:
        interface = evolve(interface, profile(**shares))
        seen.append(interface.active)
    return seen


ONE = InterfaceSettings(min_rounds=1)
HIGH, MIDDLE, LOW = ({"recovery_failure": x} for x in (0.2, 0.06, 0.01))


def test_hysteresis():
    assert run(ONE, MIDDLE, HIGH, MIDDLE, MIDDLE, LOW, MIDDLE) == [
        (),
        ("recovery_failure",),
        ("recovery_failure",),
        ("recovery_failure",),
        (),
        (),
    ]


def test_a_cue_retires_when_the_failure_is_mastered():
    """In the released code nothing ever retired. Here a moving average that falls takes the cue with it."""
    interface, p = initial(InterfaceSettings()), Profile()
    p = profile(0.5, before=p, recovery_failure=0.3)
    interface = evolve(interface, p)
    assert interface.active == ("recovery_failure",)
    for _ in range(4):
        p = profile(0.5, before=p)
        interface = evolve(interface, p)
    assert interface.active == ()
    assert interface.round == 5
    assert evolve(Interface(active=("recovery_failure",), ages=(9,)), p).retired == ("recovery_failure",)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_minimum_rounds(n):
    settings = InterfaceSettings(min_rounds=n)
    shown = sum(bool(x) for x in run(settings, HIGH, *[LOW] * 6))
    assert shown == max(1, n)


def test_thresholds_are_per_label_and_never_summed():
    shares = {label: 0.07 for label in FAILURE_LABELS}
    assert run(ONE, shares) == [()]
    settings = InterfaceSettings(min_rounds=1, activate={"state_mismatch": 0.07}, retire={"state_mismatch": 0.05})
    assert run(settings, shares) == [("state_mismatch",)]


def test_minimum_count():
    assert evolve(initial(InterfaceSettings(min_count=5)), profile(turns=20, recovery_failure=0.2)).active == ()
    assert evolve(initial(InterfaceSettings(min_count=4)), profile(turns=20, recovery_failure=0.2)).active != ()


def test_at_most_k_ranked_by_rate_ties_by_the_order_of_labels():
    shares = {"spurious_tool_call": 0.3, "missing_tool_call": 0.2, "invalid_tool_call": 0.2, "state_mismatch": 0.1}
    for k, wanted in [
        (0, ()),
        (1, ("spurious_tool_call",)),
        (2, ("spurious_tool_call", "invalid_tool_call")),
        (3, ("spurious_tool_call", "invalid_tool_call", "missing_tool_call")),
    ]:
        assert run(InterfaceSettings(max_cues=k), shares) == [wanted]


def test_a_young_cue_is_not_pushed_out_within_its_minimum_rounds():
    settings = InterfaceSettings(max_cues=1, min_rounds=2)
    first, more = {"recovery_failure": 0.1}, {"recovery_failure": 0.1, "missing_tool_call": 0.5}
    assert run(settings, first, more, more) == [
        ("recovery_failure",),
        ("recovery_failure",),
        ("missing_tool_call",),
    ]


def test_zeros_in_the_settings_are_honoured():
    always = InterfaceSettings(activate={"response_mismatch": 0}, retire={"response_mismatch": 0}, min_count=0)
    assert run(always, {}, {}) == [("response_mismatch",)] * 2
    assert InterfaceSettings(max_cues=0, min_rounds=0, min_count=0).to_dict()["max_cues"] == 0
    # An activation below the default retirement pulls that one down too.
    assert InterfaceSettings(activate={"response_mismatch": 0.01}).retire["response_mismatch"] == 0.01


def test_disabled_components_bring_no_cue():
    shares = {"recovery_failure": 0.3, "missing_tool_call": 0.2, "argument_mismatch": 0.1}
    assert run(InterfaceSettings(components=("schema", "cap")), shares) == [("missing_tool_call", "argument_mismatch")]
    assert run(InterfaceSettings(components=("err",)), shares) == [("recovery_failure", "argument_mismatch")]
    assert evolve(BARE, profile(**shares)).active == ()


def test_pinned_cues_stay_and_do_not_count():
    settings = InterfaceSettings(pinned=("spurious_tool_call",), max_cues=1, min_rounds=0)
    assert initial(settings).active == ("spurious_tool_call",)
    assert run(settings, HIGH, {}, {}) == [
        ("spurious_tool_call", "recovery_failure"),
        ("spurious_tool_call",),
        ("spurious_tool_call",),
    ]
    assert initial(settings).describe()["active"][0]["reason"] == "pinned"


def test_an_empty_round_changes_nothing_but_the_age():
    before = evolve(initial(InterfaceSettings()), profile(recovery_failure=0.3))
    after = evolve(before, Profile().update(count([]), 0.5))
    assert after.active == before.active
    assert (after.round, after.ages) == (2, (1,))
    assert evolve(initial(InterfaceSettings()), Profile()).active == ()


def test_pure_and_the_same_on_every_host():
    interface = Interface(active=("recovery_failure",), settings=InterfaceSettings(), ages=(4,))
    p = profile(recovery_failure=0.1, missing_tool_call=0.1, argument_mismatch=0.3)
    assert evolve(interface, p) == evolve(Interface.from_dict(interface.to_dict()), Profile.from_dict(p.to_dict()))
    assert interface == Interface(active=("recovery_failure",), settings=InterfaceSettings(), ages=(4,))


def test_excluded_and_success_labels_never_become_cues():
    p = Profile().update(count([Diagnosis(tuple(TurnLabel(x) for x in LABELS))] * 50), 1.0)
    active = evolve(initial(InterfaceSettings(max_cues=99)), p).active
    assert set(active) == set(FAILURE_LABELS)


def test_the_log_says_why():
    settings = InterfaceSettings(min_rounds=3)
    first = evolve(initial(settings), profile(recovery_failure=0.2))
    (cue,) = first.describe()["active"]
    assert (cue["rate"], cue["activate"], cue["reason"]) == (0.2, 0.08, "rate 0.200 >= 0.08")
    (cue,) = evolve(first, profile(recovery_failure=0.05)).describe()["active"]
    assert cue["reason"] == "rate 0.050 not below 0.04"
    (cue,) = evolve(first, profile()).describe()["active"]
    assert cue["reason"] == "rate 0.000 below 0.04, but shown for only 1 of 3 rounds"


# --- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, words",
    [
        ({"components": ("schema", "hints")}, ["interface.components", "'hints'"]),
        ({"components": "err"}, ["interface.components", "('err',)"]),
        ({"placement": "top"}, ["interface.placement", "'top'", "'inline'"]),
        ({"activate": {"bad_call": 0.1}}, ["interface.activate", "'bad_call'"]),
        ({"activate": {"state_mismatch": 8}}, ["interface.activate['state_mismatch']", "8", "between 0.0 and 1.0"]),
        ({"retire": {"state_mismatch": 0.5}}, ["interface.retire['state_mismatch']=0.5", "0.08", "lower retire"]),
        ({"max_cues": -1}, ["interface.max_cues=-1", "at least 0"]),
        ({"min_count": 1.5}, ["interface.min_count=1.5"]),
        ({"max_tools": 0}, ["interface.max_tools=0", "at least 1"]),
        ({"pinned": ("pass",)}, ["interface.pinned", "'pass'"]),
        (
            {"pinned": ("recovery_failure",), "components": ("cap",)},
            ["interface.pinned", "'recovery_failure'", "unpin"],
        ),
        ({"schema_parts": ("examples",)}, ["interface.schema_parts", "'examples'"]),
        ({"max_hints": 3}, ["'max_hints'", "max_cues"]),
    ],
)
def test_bad_settings_name_the_field_the_value_and_the_mend(options, words):
    with pytest.raises(ValueError) as error:
        InterfaceSettings.from_dict(options)
    message = str(error.value)
    assert "\n" not in message
    assert all(w in message for w in words), message


def test_settings_from_a_config():
    ml_collections = pytest.importorskip("ml_collections")
    options = ml_collections.ConfigDict({"activate": {"state_mismatch": 0.3}, "pinned": ("spurious_tool_call",)})
    settings = InterfaceSettings.from_dict(options)
    assert settings.activate["state_mismatch"] == 0.3
    assert settings.activate["recovery_failure"] == 0.08
    assert InterfaceSettings.from_dict(settings.to_dict()) == settings


# --- properties, on random profiles -----------------------------------------------------------------------------------
def random_settings(rng, **fixed):
    on = {label: rng.choice([0.0, 0.02, 0.08, 0.15, 0.3]) for label in FAILURE_LABELS}
    off = {label: on[label] * rng.choice([0.0, 0.5, 1.0]) for label in FAILURE_LABELS}
    options = {
        "min_rounds": rng.randint(0, 3),
        "min_count": rng.randint(0, 6),
        "max_cues": rng.randint(0, len(FAILURE_LABELS)),
        "pinned": tuple(rng.sample(FAILURE_LABELS, rng.choice([0, 0, 1, 2]))),
    }
    return InterfaceSettings(activate=on, retire=off, **options | fixed)


def random_shares(rng):
    """Shares of a round, sometimes drifting to one failure, sometimes none at all."""
    labels = rng.sample(FAILURE_LABELS, rng.randint(0, len(FAILURE_LABELS)))
    return {label: rng.choice([0.01, 0.03, 0.05, 0.08, 0.14]) for label in labels}


def random_run(rng, settings, rounds=25):
    """(before, profile, after) of each round."""
    interface, p = initial(settings), Profile()
    for _ in range(rounds):
        p = profile(rng.choice([0.3, 0.5, 1.0]), turns=rng.choice([0, 20, 100]), before=p, **random_shares(rng))
        before, interface = interface, evolve(interface, p)
        yield before, p, interface


@pytest.mark.parametrize("seed", range(40))
def test_every_coming_and_going_has_its_reason(seed):
    """Whatever the profiles: a cue comes at `activate` only, is not dropped between the thresholds unless others crowd
    it out, is gone below `retire` once it was shown for its rounds; never more than allowed; the same each time."""
    rng = random.Random(seed)
    s = random_settings(rng)
    for before, p, after in random_run(rng, s):
        assert evolve(before, p) == after == Interface.from_dict(after.to_dict())
        assert set(s.pinned) <= set(after.active) and len(after.active) <= len(s.pinned) + s.max_cues
        assert after.round == before.round + 1
        assert set(after.retired) == set(before.active) - set(after.active)
        if p.latest.turns == 0:
            assert after.active == before.active
            continue
        age = dict(zip(before.active, before.ages, strict=True))
        for label in set(FAILURE_LABELS) - set(s.pinned):
            rate, seen = p.rates[label], p.counts[LABEL_ID[label]]
            here, then = label in before.active, label in after.active
            crowded = len(after.active) == len(s.pinned) + s.max_cues
            may_come = rate >= s.activate[label] and seen >= s.min_count
            over = rate < s.retire[label] and age.get(label, 0) + 1 >= s.min_rounds
            if not here:
                assert then == may_come or (may_come and crowded)
            elif over:
                assert not then
            else:
                assert then or crowded  # within the band, or still young


@pytest.mark.parametrize("seed", range(10))
def test_hysteresis_never_flickers(seed):
    """Rates within the band change nothing, however they move; under a profile at rest Ω comes to rest."""
    rng = random.Random(seed)
    s = InterfaceSettings(min_rounds=1, min_count=0, max_cues=len(FAILURE_LABELS))
    started = tuple(rng.sample(FAILURE_LABELS, 3))
    interface = Interface(active=started, settings=s, ages=(5, 5, 5))
    for _ in range(20):
        band = {label: rng.choice([0.04, 0.05, 0.06, 0.07]) for label in FAILURE_LABELS}
        interface = evolve(interface, profile(**band))
        assert set(interface.active) == set(started) and interface.retired == ()
    settings, shares = random_settings(rng), random_shares(rng)
    interface, p = initial(settings), profile(**shares)
    states = []
    for _ in range(12):
        interface = evolve(interface, p)
        states.append(interface.active)
    assert len(set(states[settings.min_rounds + 1 :])) == 1


@pytest.mark.parametrize("label", FAILURE_LABELS)
def test_every_cue_can_come_and_go(label):
    """Each label's text appears when its failure is frequent, and is retired when the failure is mastered: the rule
    that the release never reached, because its reader looked for a number that its writer did not store."""
    interface, p = initial(InterfaceSettings()), Profile()
    tools = ({"name": "send", "parameters": {"properties": {"to": {"type": "string"}}, "required": ["to"]}},)
    errors = [CallResult(Call("send"), "x", k, "to") for k in ("unknown_tool", "missing_argument", "tool_error")]

    def said():
        return interface.note(tools) + "".join(interface.feedback(e, tools) for e in errors)

    assert said() == ""
    p = profile(0.5, before=p, **{label: 0.3})
    interface = evolve(interface, p)
    assert interface.active == (label,) and said().startswith("[hint] ")
    shown = 1
    while interface.active:
        p = profile(0.5, before=p)
        interface = evolve(interface, p)
        shown += 1
        assert shown < 6
    assert interface.retired == (label,) and p.rates[label] < 0.04 and said() == ""
    assert interface.describe()["retired"] == [label]


def test_mastery_clears_the_interface_from_any_state():
    rng = random.Random(7)
    for _ in range(20):
        settings = random_settings(rng, pinned=())
        (*_, (_, p, interface)) = random_run(rng, settings, rounds=6)
        for _ in range(12):
            p = profile(0.5, before=p)
            interface = evolve(interface, p)
        kept = {label for label in interface.active if settings.retire[label] > 1e-3}
        assert not kept
