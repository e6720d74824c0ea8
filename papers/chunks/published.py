"""Published figures that ours stand beside: the description of KVBoost 0.1.0 on the Python Package Index.

TinyLlama-1.1B-Chat (22 layers) in float16 on Apple silicon, unless another model is named. Times in milliseconds.
"""

from __future__ import annotations

SOURCE = "KVBoost 0.1.0, TinyLlama-1.1B-Chat in float16, Apple silicon"
EXAMPLES = "KVBoost 0.1.0, Qwen2.5-3B in float16, Apple silicon"

# workload, mode, TTFT, speed-up (experiment 1)
MODES = (
    ("system prompt", "baseline", 191.7, 1.0),
    ("system prompt", "prefix cache", 66.5, 2.9),
    ("system prompt", "chunk reuse", 68.9, 2.8),
    ("RAG document", "baseline", 75.2, 1.0),
    ("RAG document", "prefix cache", 95.7, 0.8),
    ("RAG document", "chunk reuse", 25.5, 3.0),
)

# stage, baseline, chunk reuse; None: not given (experiment 2, RAG)
BREAKDOWN = (
    ("cache lookup", 0.0, 13.3),
    ("selective recompute", 0.0, 553.8),
    ("transfer to the device", 0.0, None),
    ("prefill of what is left", 1431.8, 703.1),
    ("decode", 747.6, 605.4),
    ("total", 2179.4, 1875.8),
)

# chunk size, overlap, TTFT, match %, hit rate, MB per chunk (experiment 3)
SWEEP = (
    (64, 0, 21.2, 83.4, 0.750, 0.79),
    (64, 16, 20.3, 83.4, 0.750, 0.79),
    (128, 0, 19.7, 83.4, 0.429, 2.23),
    (128, 16, 16.1, 83.4, 0.429, 2.23),
)

# test, result (experiment 4)
QUALITY = (
    ("perplexity of three passages", "5.89, 8.41, 9.77"),
    ("greedy output match, with repair", "100 %"),
    ("greedy output match, without", "100 %"),
    ("long-range dependency match", "100 %"),
    ("Hellinger distance of samples, temperature 0.5", "near 0"),
)

# turn, history tokens, baseline TTFT, cached TTFT, reuse % (experiment 5)
CHAT = ((1, 118, 59.8, 83.8, 0), (4, 255, 63.2, 57.2, 50), (7, 425, 104.2, 59.9, 90), (8, 483, 419.1, 405.1, 80))
# turn, history tokens, baseline, cached, reuse %, speed-up (examples, another model)
CHAT_3B = (
    (1, 232, 35.3, 30.9, 0, 1.1),
    (2, 353, 149.3, 78.9, 36, 1.9),
    (3, 495, 193.9, 60.0, 52, 3.2),
    (4, 621, 374.0, 61.9, 62, 6.0),
    (5, 762, 657.5, 56.5, 67, 11.6),
    (6, 946, 1228.0, 62.7, 68, 19.6),
    (7, 1113, 1736.6, 63.8, 81, 27.2),
    (8, 1353, 2970.0, 62.0, 76, 47.9),
)
# query, baseline, cached, reuse %, speed-up (examples)
CODE_3B = (("1 (cold)", 1670, 2292, 0, 0.7), ("2", 1577, 75, 92, 21.1), ("3", 2133, 128, 92, 16.6))
RAG_3B = (("1 (cold)", 71.5, 48.3, 0, 1.5), ("2", 77.8, 51.2, 86, 1.5), ("3", 47.4, 55.0, 85, 0.9))
# mode, mean TTFT, queries per second (20 queries)
SERVER = (("baseline", 332.9, 0.75), ("chunk reuse", 78.4, 1.74))

# tokens, actual MB, theoretical MB (experiment 6)
MEMORY = ((32, 0.72, 5.77), (64, 0.79, 11.53), (128, 2.23, 23.07), (256, 2.23, 46.14), (512, 2.23, 92.27))
BREAK_EVEN = {
    "baseline TTFT": "623 ms",
    "cached TTFT": "20.8 ms",
    "speed-up": "29.9 ×",
    "cache memory": "15.5 MB",
    "warm-up": "7,300 ms",
    "break-even": "12.1 requests",
}

# feature, KVBoost, vLLM, SGLang (experiment 7)
FEATURES = (
    ("prefix caching", "yes", "yes", "yes"),
    ("reuse away from the prefix", "yes", "no", "partial"),
    ("selective recompute at borders", "yes", "no", "no"),
    ("content-addressed keys", "SHA-256", "hash", "trie"),
    ("cold storage on disk", "yes", "no", "no"),
    ("semantic chunking", "yes", "no", "no"),
    ("continuous batching", "no", "yes", "yes"),
    ("paged attention", "no", "yes", "yes"),
    ("several GPUs", "no", "yes", "yes"),
)

# strategy, system prompt TTFT, RAG TTFT, RAG hit rate %, MB (experiment 8)
CHUNKERS = (
    ("fixed", 32.6, 41.3, 65.0, 28.4),
    ("semantic", 20.9, 45.3, 61.9, 27.4),
    ("document", 34.7, 48.8, 21.4, 39.9),
)

# pattern, hit rate %, mean TTFT, unique chunks (experiment 9)
TRAFFIC = (("uniform", 22, 138.7, 25), ("zipf", 38, 68.5, 22), ("temporal", 62, 65.0, 15))
WARM_UP = ((5, 0), (10, 27), (20, 43), (30, 48), (50, 54))  # requests, hit rate %, Zipf

# what, baseline, chunk reuse (experiment 10)
RIGOR = (
    ("system prompt", "mean", "52.7", "119.1"),
    ("system prompt", "95 % interval", "[27.9, 77.5]", "[110.6, 127.5]"),
    ("system prompt", "CV", "0.496", "0.479"),
    ("system prompt", "outliers", "0", "1"),
    ("system prompt", "Welch's t, p", "-4.96", "< 0.001"),
    ("RAG document", "mean", "60.7", "65.8"),
    ("RAG document", "95 % interval", "[42.0, 79.4]", "[46.2, 85.3]"),
    ("RAG document", "Welch's t, p", "-0.37", "0.713"),
    ("RAG document", "Cohen's d", "-0.165", ""),
    ("cold start", "TTFT", "368", "118"),
)
