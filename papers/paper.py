"""Published figures that ours stand beside: Sarkar, "ContextCache" (February 2026).

Qwen3-8B in 4-bit NF4 on one RTX 3090 Ti, 20 tools per prompt, 25 examples per split. Times in milliseconds. The rows
for Tool Gisting and ToolFormerMicro are as that paper quotes them.
"""

from __future__ import annotations

SOURCE = "Sarkar 2026, Qwen3-8B NF4, RTX 3090 Ti, 25 examples per split"

# split, condition, TSA, PF1, EM, FPR, FNR, link, prefill, decode (Table 1)
TABLE_1 = (
    ("seen", "per-tool NoPE", 0.100, 0.667, 0.050, 0.000, 0.900, 1731, 140, 7654),
    ("seen", "group cache", 0.850, 0.735, 0.600, 0.000, 0.050, 1861, 145, 8293),
    ("seen", "full prefill", 0.850, 0.716, 0.550, 0.000, 0.050, 0, 1788, 9181),
    ("held-out", "per-tool NoPE", 0.000, 0.000, 0.000, 0.000, 0.950, 1788, 157, 11225),
    ("held-out", "group cache", 0.900, 0.694, 0.600, 0.000, 0.100, 1681, 171, 9117),
    ("held-out", "full prefill", 0.900, 0.694, 0.600, 0.000, 0.100, 0, 2659, 9313),
    ("unseen", "per-tool NoPE", 0.000, 0.000, 0.000, 0.000, 1.000, 1650, 147, 11496),
    ("unseen", "group cache", 0.850, 0.676, 0.550, 0.000, 0.150, 1407, 139, 10523),
    ("unseen", "full prefill", 0.850, 0.676, 0.550, 0.000, 0.150, 0, 1648, 10386),
)

# what, published value (Table 2)
TABLE_2 = {
    "tools": "20",
    "cached prefix tokens": "2,851",
    "cache size": "401 MB",
    "compile, once": "1,386 ms",
    "full prefill TTFT": "787 ms",
    "hit TTFT": "114 ms",
    "of it, the cached KV into place": "2 ms",
    "of it, prefill of the question": "112 ms",
    "speed-up": "6.9 ×",
    "saved per request": "673 ms",
    "saved in 1,000 requests": "672 s",
    "break-even": "2.1 requests",
}

# tools, full prefill, hit, speed-up, compile, megabytes (Table 3)
TABLE_3 = ((5, 237, 120, 2.0, 260, 91), (10, 395, 114, 3.5, 401, 183), (20, 794, 121, 6.6, 922, 401))

# method, TSA, EM, FPR; None: not published (figure 6 and section 5.5)
METHODS = (
    ("ContextCache", 0.850, 0.600, 0.000),
    ("ToolFormerMicro", 0.818, 0.580, None),
    ("Tool Gisting K=8", 0.714, None, 0.302),
    ("per-tool NoPE", 0.100, 0.050, 0.000),
)

NOPE_COSINE = 0.654  # of logits, per-tool composition against full prefill (section 3.3)
IDENTICAL = {"seen": (22, 25), "held-out": (21, 25), "unseen": (19, 25)}  # answers of its published code, recounted
