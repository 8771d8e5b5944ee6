"""The words of the toolbox world: closed pools from which every skin, task and demonstration is written.

Two rules make held-out domains fair to a small policy that starts from random weights: a held-out domain uses only
words of these pools (in tool names never combined so in training), and a verb belongs to one role only, so that the
verb of an unseen tool name still says what the tool does. Words are short, lower case and single (no digits, no `_`).
"""

from __future__ import annotations

from collections.abc import Mapping

# --- what tools are called: verbs by role ----------------------------------------------------------------------------
_FIND = ("find", "seek", "lookup", "locate", "trace")
_COUNT = ("count", "read", "check", "tally", "view")

VERBS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ledger": {
        "find": _FIND,
        "count": _COUNT,
        "add": ("add", "load", "credit", "grant", "fill"),
        "move": ("move", "send", "shift", "pass", "carry"),
        "thaw": ("thaw", "unseal", "free", "clear", "unlock"),
        "grade": ("grade", "rank", "rate", "mark", "sort"),
    },
    "devices": {
        "scan": ("scan", "list", "map", "survey", "browse"),
        "level": ("set", "tune", "adjust", "turn", "dial"),
        "power": ("power", "switch", "flip", "toggle", "feed"),
        "release": ("release", "unlatch", "unbar", "undo", "loosen"),
        "timer": ("run", "time", "cycle", "plan", "schedule"),
        "sense": ("sense", "measure", "gauge", "probe", "meter"),
    },
    "desk": {
        "login": ("login", "signin", "enter", "join", "connect"),
        "find": _FIND,
        "note": ("note", "comment", "write", "post", "attach"),
        "assign": ("assign", "give", "hand", "route", "appoint"),
        "reopen": ("reopen", "revive", "restore", "reset", "wake"),
        "close": ("close", "end", "finish", "settle", "solve"),
        "show": ("show", "get", "peek", "inspect", "detail"),
    },
    "booking": {
        "find": _FIND,
        "count": _COUNT,
        "reserve": ("reserve", "book", "keep", "claim", "allot"),
        "confirm": ("confirm", "buy", "order", "accept", "take"),
        "cancel": ("cancel", "drop", "void", "quit", "discard"),
        "renew": ("renew", "extend", "prolong", "stretch", "recover"),
        "refresh": ("refresh", "sync", "update", "reload", "poll"),
    },
}

# --- what a domain talks about: nouns by kind ------------------------------------------------------------------------
NOUNS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ledger": {
        "entity": ("account", "bin", "berth", "wallet", "vault", "tank", "shelf", "member"),
        "unit": ("coins", "boxes", "crates", "points", "litres", "seeds", "bricks", "stamps"),
    },
    "devices": {
        "place": ("room", "field", "deck", "hall", "bay", "cabin", "lab", "floor"),
        "entity": ("device", "unit", "machine", "gear", "gadget", "engine"),
    },
    "desk": {
        "entity": ("ticket", "case", "task", "issue", "report", "file", "request", "thread"),
        "user": ("user", "agent", "nurse", "clerk", "editor", "guide"),
    },
    "booking": {
        "entity": ("item", "part", "lot", "batch", "piece", "ware"),
        "ticket": ("hold", "basket", "draft", "cart", "bundle", "slip"),
    },
}

# --- argument names, by what they mean -------------------------------------------------------------------------------
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "id": ("id", "key", "code", "ref", "tag"),
    "who": ("who", "owner", "person", "holder", "client"),
    "where": ("where", "place", "area", "zone", "spot"),
    "topic": ("topic", "title", "subject", "theme"),
    "what": ("what", "product", "article", "goods"),
    "amount": ("amount", "sum", "total", "quantity", "size"),
    "source": ("source", "origin", "giver", "start"),
    "target": ("target", "goal", "taker", "finish"),
    "value": ("value", "level", "percent", "degree"),
    "state": ("state", "status", "power", "position"),
    "minutes": ("minutes", "length", "duration", "span"),
    "repeat": ("repeat", "daily", "again", "loop"),
    "speed": ("speed", "pace", "mode", "service"),
    "plan": ("plan", "grade", "tier", "type"),
    "text": ("text", "message", "body", "words"),
    "urgency": ("urgency", "priority", "flag", "weight"),
    "hold": ("hold", "number", "token", "booking"),
}

# --- closed sets of values (enums) -----------------------------------------------------------------------------------
CHOICES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "speed": (("slow", "fast"), ("sea", "air"), ("later", "now"), ("cheap", "express")),
    "plan": (
        ("basic", "silver", "gold"),
        ("small", "normal", "big"),
        ("north", "east", "south"),
        ("raw", "good", "best"),
    ),
    "urgency": (("low", "high"), ("green", "red"), ("normal", "urgent"), ("minor", "major")),
    "state": (("off", "on"), ("down", "up"), ("idle", "live")),
}

# --- status words: why a tool refuses --------------------------------------------------------------------------------
STATUS: Mapping[str, tuple[str, ...]] = {
    "frozen": ("frozen", "sealed", "blocked", "jammed", "paused"),
    "locked": ("locked", "latched", "barred", "stuck", "tied"),
    "closed": ("closed", "ended", "done", "solved", "shut"),
    "expired": ("expired", "lapsed", "old", "late", "dead"),
    "stale": ("stale", "outdated", "dirty", "dusty", "wrong"),
    "absent": ("absent", "away", "out", "unknown", "missing"),
}

# --- what users name -------------------------------------------------------------------------------------------------
NAMES: Mapping[str, tuple[str, ...]] = {
    "people": (
        "ana", "ben", "cleo", "dan", "eva", "finn", "gus", "hana", "ivan", "jude", "kim", "leo", "mia", "noor", "otto",
        "pia", "raj", "sam", "tess", "uma", "vic", "wes", "yan", "zoe",
    ),
    "goods": (
        "rice", "tea", "salt", "corn", "wool", "silk", "soap", "paint", "nails", "glue", "cups", "forks", "pens",
        "chalk", "rope", "tape", "bulbs", "locks", "tiles", "lamps",
    ),
    "topics": (
        "printer", "door", "roof", "badge", "menu", "laptop", "lift", "phone", "invoice", "garden", "window", "router",
        "kettle", "parking", "heating", "payroll", "website", "backup", "poster", "trip",
    ),
    "places": (
        "attic", "cellar", "kitchen", "lobby", "office", "studio", "garage", "porch", "tower", "barn", "meadow",
        "orchard", "pond", "yard", "stable", "mill",
    ),
}  # fmt: skip
DEVICES: tuple[str, ...] = (
    "lamp", "fan", "heater", "pump", "gate", "vent", "oven", "radio", "camera", "mixer", "blind", "boiler",
)  # fmt: skip
NOTES: tuple[str, ...] = (
    "paid", "broken", "ready", "lost", "fixed", "noisy", "empty", "waiting", "checked", "delayed", "cleaned", "moved",
)  # fmt: skip
#: Ids are one of these letters and one digit 1..9, drawn without repetition inside a task.
ID_LETTERS = "bcdfghjkmnpqrtvwxz"


def all_words() -> tuple[str, ...]:
    """Every word of the pools, sorted: what a tokenizer trained for this world should hold."""
    found: set[str] = set()
    for table in (*VERBS.values(), *NOUNS.values(), ARGUMENTS, STATUS, NAMES):
        for pool in table.values():
            found.update(pool)
    for options in CHOICES.values():
        for option in options:
            found.update(option)
    found.update(DEVICES, NOTES)
    return tuple(sorted(found))
