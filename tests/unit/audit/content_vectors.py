"""Known answers of the content digest: for `content_digest`, for the scan's kernel, and for other languages.

(sequence, key, value, headers, digest). The digests were checked with an XXH64 written from its specification
(`test_content_digest.py`); never change one: producers in the field have written them.
"""

VECTORS = [
    (1, None, None, (), 0x48B4E04BB1AA5A8E),
    (1, b"", b"", (), 0x899FB35F8D5447F1),
    (1, b"key", b"value", (), 0x8F3C83B46E3F19C5),
    (2, b"key", b"value", (), 0xFC490943E3738F45),
    (1, b"ke", b"yvalue", (), 0x08ED79DFBAA0EAC0),
    (0, None, b"count-only", (), 0x9CE264975BE83715),
    ((1 << 63) - 1, b"k", b"v", (), 0x15DAEC73AB8EDA98),
    (7, b"key", b"value", (("a", b"1"),), 0x015150B997120260),
    (7, b"key", b"value", (("a", b"1"), ("b", b"2")), 0xE461EC9CF093B041),
    (7, b"key", b"value", (("b", b"2"), ("a", b"1")), 0x2710E5E4631CD82E),
    (7, b"key", b"value", (("a", None),), 0x813A9B7D84F50344),
    (7, b"key", b"value", (("a", b""),), 0xC4CA685A21AC7650),
    (7, b"key", b"value", (("", b"1"),), 0x2A0DFC5DC6965719),
    (
        7,
        "schlüssel".encode(),
        "wert ✈".encode(),
        (("höhe", b"ft"),),
        0x39966CD7D4018727,
    ),
    (3, bytes(range(32)), bytes(range(256)), (), 0x235CCEB8482396D8),
    (4, b"k" * 63, b"v" * 63, (), 0x89E6C91996C6CB27),
    (4, b"k" * 64, b"v" * 64, (), 0xCDAC26F497F0C69D),
    (5, None, b"x" * 8191, (), 0x029105899997D92B),
    (5, None, b"x" * 8192, (), 0x791AD28E14994BAD),
    (5, None, b"x" * 100_000, (("h", b"y" * 300),), 0xB6CEBE76BC4A6E4E),
]

DIGEST_SUM = 0x7D5CD12B601BE65B
"""Of all of them, modulo 2^64."""
