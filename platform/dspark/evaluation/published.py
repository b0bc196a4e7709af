"""What the DSpark paper reports, to set beside what was measured here. Figures were read from its plots to 0.01.

Accepted lengths count the bonus token, at temperature 1, without a reasoning phase, chains of 7 drafted tokens.
"""

from typing import Any, Literal

PublishedTarget = Literal["qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b"]
NAMES = {"qwen3_4b": "Qwen3-4B", "qwen3_8b": "Qwen3-8B", "qwen3_14b": "Qwen3-14B", "gemma4_12b": "Gemma-4-12B"}
BENCHMARKS = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2")
DOMAINS = {"math": BENCHMARKS[:3], "code": BENCHMARKS[3:6], "chat": BENCHMARKS[6:]}

# Table 1: accepted length by target, drafter and benchmark.
TABLE_1: dict[str, dict[str, tuple[float, ...]]] = {
    "qwen3_4b": {
        "eagle3": (5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55),
        "dflash": (5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83),
        "dspark": (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
    },
    "qwen3_8b": {
        "eagle3": (5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54),
        "dflash": (5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
        "dspark": (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
    },
    "qwen3_14b": {
        "eagle3": (5.24, 4.60, 3.71, 3.81, 4.14, 4.01, 2.62, 2.47, 2.48),
        "dflash": (5.41, 4.84, 3.98, 4.44, 4.59, 4.33, 3.10, 2.94, 2.72),
        "dspark": (6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
    },
    "gemma4_12b": {
        "eagle3": (5.87, 5.46, 4.83, 4.72, 5.37, 4.16, 3.19, 3.06, 2.72),
        "dflash": (5.45, 5.04, 4.22, 4.39, 4.95, 3.70, 2.98, 2.84, 2.59),
        "dspark": (6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92),
    },
}

# Figure 2: conditional acceptance at positions 1 to 7, Qwen3-4B.
FIGURE_2: dict[str, dict[str, tuple[float, ...]]] = {
    "math": {
        "dspark": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
        "dflash": (0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828),
        "eagle3": (0.811, 0.823, 0.838, 0.844, 0.851, 0.856, 0.850),
    },
    "code": {
        "dspark": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
        "dflash": (0.865, 0.815, 0.797, 0.801, 0.810, 0.801, 0.777),
        "eagle3": (0.771, 0.774, 0.781, 0.791, 0.787, 0.794, 0.784),
    },
    "chat": {
        "dspark": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
        "dflash": (0.718, 0.648, 0.638, 0.661, 0.682, 0.692, 0.688),
        "eagle3": (0.534, 0.589, 0.642, 0.678, 0.709, 0.729, 0.733),
    },
}

# Figure 3: accepted length by (drafter, layers) and benchmark, Qwen3-4B.
FIGURE_3: dict[tuple[str, int], tuple[float, ...]] = {
    ("dspark", 1): (4.63, 4.35, 3.64, 3.92, 3.87, 3.52, 2.77, 2.72, 2.35),
    ("dspark", 2): (5.70, 5.32, 4.44, 4.69, 4.94, 4.46, 3.34, 3.20, 2.97),
    ("dspark", 5): TABLE_1["qwen3_4b"]["dspark"],
    ("dflash", 5): TABLE_1["qwen3_4b"]["dflash"],
}

# Figure 4: by the draft's length with its anchor, and the time of a round in ms at 128 requests, Qwen3-4B.
FIGURE_4_LENGTHS = (4, 8, 12, 16)
FIGURE_4: dict[str, dict[str, tuple[float, ...]]] = {
    "math": {"vanilla": (3.54, 5.57, 6.62, 7.19), "rnn": (3.54, 5.73, 6.97, 7.68), "none": (3.32, 4.80, 5.39, 5.54)},
    "code": {"vanilla": (3.41, 5.12, 5.89, 6.26), "rnn": (3.42, 5.26, 6.07, 6.44), "none": (3.23, 4.44, 4.85, 4.96)},
    "chat": {"vanilla": (2.80, 3.49, 3.66, 3.70), "rnn": (2.83, 3.57, 3.72, 3.81), "none": (2.61, 2.95, 3.02, 3.03)},
}
FIGURE_4_MS: dict[str, tuple[float, ...]] = {
    "vanilla": (188.10, 190.33, 192.69, 195.00),
    "rnn": (188.13, 190.42, 192.83, 195.20),
    "none": (187.69, 189.27, 190.90, 192.48),
}

# Figure 5: verified and accepted tokens of a round, anchor and bonus included, by threshold, Qwen3-4B.
FIGURE_5_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FIGURE_5: dict[str, dict[str, tuple[float, ...]]] = {
    "math": {
        "verified": (7.95, 7.95, 7.95, 7.92, 7.87, 7.77, 7.51, 6.99, 6.34, 4.93),
        "accepted": (6.11, 6.11, 6.11, 6.12, 6.13, 6.13, 6.01, 5.74, 5.48, 4.56),
    },
    "code": {
        "verified": (7.96, 7.96, 7.95, 7.88, 7.69, 7.44, 7.01, 6.44, 5.58, 4.05),
        "accepted": (5.38, 5.38, 5.39, 5.40, 5.36, 5.36, 5.24, 5.06, 4.70, 3.73),
    },
    "chat": {
        "verified": (7.97, 7.95, 7.69, 6.92, 5.93, 4.92, 4.07, 3.32, 2.60, 2.09),
        "accepted": (3.64, 3.62, 3.64, 3.56, 3.47, 3.27, 3.05, 2.74, 2.33, 1.99),
    },
}

# Figure 6: Alpaca, calibration error of the survival before and after STS, and AUROC, by position.
FIGURE_6: dict[int, dict[str, float]] = {
    1: {"before": 0.057, "after": 0.020, "auroc": 0.818},
    3: {"before": 0.082, "after": 0.017, "auroc": 0.812},
    5: {"before": 0.058, "after": 0.008, "auroc": 0.864},
    7: {"before": 0.033, "after": 0.004, "auroc": 0.907},
}
# (predicted, observed) of some bins.
FIGURE_6_BINS: dict[int, dict[str, tuple[tuple[float, float], ...]]] = {
    1: {"before": ((0.53, 0.47), (0.72, 0.62), (0.88, 0.80)), "after": ((0.53, 0.47), (0.72, 0.71), (0.88, 0.89))},
    3: {"before": ((0.52, 0.40), (0.72, 0.59), (0.87, 0.77)), "after": ((0.52, 0.53), (0.72, 0.74), (0.87, 0.89))},
}

# Figure 7: (tokens/s of a user, thousand tokens/s of a GPU), DeepSeek-V4 preview models under live traffic.
FIGURE_7: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "V4-Flash": {
        "mtp-1": ((50, 19.4), (84, 9.5), (91, 7.4), (100, 4.5), (110, 2.6), (120, 1.5), (134, 0.7)),
        "dspark adaptive": ((74, 16.7), (147, 8.5), (164, 6.5), (180, 4.3), (200, 2.6), (222, 1.5)),
    },
    "V4-Pro": {
        "mtp-1": ((24, 6.5), (36, 3.6), (42, 2.0), (50, 0.84), (60, 0.32)),
        "dspark adaptive": ((32, 5.9), (60, 3.2), (73, 1.9), (81, 1.3), (89, 0.8), (100, 0.45)),
    },
}

# Figure 8: (requests at once, thousand tokens/s), and (requests at once, verified tokens a request, anchor included).
FIGURE_8: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "V4-Flash": {
        "mtp-1": ((49, 5.0), (102, 8.9), (146, 11.4), (198, 13.7)),
        "dspark adaptive": ((50, 7.7), (103, 12.0), (149, 14.2), (195, 15.9)),
    },
    "V4-Pro": {
        "mtp-1": ((49, 2.35), (98, 3.7), (146, 4.7), (204, 5.6)),
        "dspark adaptive": ((50, 3.1), (103, 4.7), (150, 5.6), (200, 6.3)),
    },
}
FIGURE_8_BUDGET: dict[str, tuple[tuple[float, float], ...]] = {
    "V4-Flash": ((20, 4.94), (56, 4.54), (104, 4.08), (152, 3.73), (204, 3.47)),
    "V4-Pro": ((5, 5.40), (56, 4.55), (105, 3.97), (150, 3.64), (192, 3.51)),
}


def table_1(target: PublishedTarget) -> dict[str, dict[str, float]]:
    """Accepted length by drafter and benchmark, and by domain: the mean of its three."""
    return {drafter: by_domain(row) for drafter, row in TABLE_1[target].items()}


def by_domain(row: tuple[float, ...]) -> dict[str, Any]:
    """{"gsm8k": …, "math": …} of nine figures in the order of BENCHMARKS."""
    values = dict(zip(BENCHMARKS, row, strict=True))
    means = {domain: sum(values[name] for name in names) / len(names) for domain, names in DOMAINS.items()}
    return values | means
