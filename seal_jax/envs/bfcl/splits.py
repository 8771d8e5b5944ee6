"""The splits SEAL and its successors report on: by scenario number, so that no scenario is on both sides.

Number n stands for the same scenario in all four categories. The numbers are those of the parquet files released with
the paper (T3RL's split); the JSON split file in the same release is another one, with 344 of 400 evaluation tasks
leaked, and must not be mixed with it.
"""

from __future__ import annotations

N_SCENARIOS = 200


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split())


TRAIN = _numbers("""
    0 2 3 5 10 12 13 14 15 16 18 19 27 30 32 33 36 37 38 42 43 44 45 46 47 51 52 54 60 61 63 64 65 66 69 72 73 76 78 79
    80 83 84 85 95 100 101 102 103 104 105 106 109 110 111 112 113 115 118 121 122 123 125 126 128 130 133 135 136 140
    142 144 145 146 148 153 155 156 158 159 160 161 162 165 167 170 171 172 175 176 177 179 184 186 187 192 193 194 195
    196
""")
ALL = frozenset(range(N_SCENARIOS))
EVAL = ALL - TRAIN
VAL = _numbers("4 9 21 29 34 48 77 81 82 98 99 120 124 127 131 132 134 138 149 164 169 174 178 183 198")

#: Split name → scenario numbers. Select on "val", report on "test" (and on "eval" = val + test, as the paper does).
SPLITS = {"train": TRAIN, "val": VAL, "test": EVAL - VAL, "eval": EVAL, "all": ALL}
