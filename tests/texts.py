"""Texts that tokenizers are apt to cut wrongly: white space, digits, contractions, scripts, emoji, code, markup."""

from __future__ import annotations

import random
import unicodedata

PLAIN = (
    "", " ", "  ", "   ", "a", " a", "a ", "  a  ", "\n", "\n\n", "\n\n\n\n\n", "\t", "\t\t", " \n ", "\r\n",
    "\r", "\r\n\r\n x",
    "Hello world", "Hello, world!", " Hello", "hello  world", "the quick brown fox jumps over the lazy dog",
    "I'm you're we've they'll he'd isn't it's", "I'M YOU'RE WE'VE THEY'LL HE'D", "l'été 'tis 'twas rock'n'roll",
    "1 12 123 1234 12345 3.14159 1,000,000", "x=1;y=22;z=333", "2024-01-02T03:04:05Z",
    "٣٤٥ ४५६ ①②③ Ⅷ ½ ²³", "a1b22c333d4444",
    "Ünïcödé strîngs ñandú", "e\u0301 vs é, a\u030a vs å", "ﬁ ligature", "Ａｆｕｌｌｗｉｄｔｈ",
    "Straße GROSS ß ẞ", "İstanbul ıi",
    "日本語のテキスト", "中文字符测试。", "한국어 문장", "Русский текст", "ελληνικά", "עברית", "العربية",
    "हिन्दी", "ไทย", "বাংলা", "தமிழ்",
    "😀😃😄", "👨‍👩‍👧‍👦 family", "🏳️‍🌈", "a😀b", "🇩🇪🇫🇷", "\U0001f9d1\U0001f3fd\u200d\U0001f4bb",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈", "\U0010ffff", "\uffff",
    "def f(x):\n    return x + 1\n", "if (a && b) { c(); } // d\n\t\treturn;", "SELECT * FROM t WHERE a='b';",
    "a->b::c[d](e)",
    'for(int i=0;i<10;++i){printf("%d\\n",i);}', "https://example.com/a/b?c=d&e=f#g", "user@example.com", "C:\\path\\to\\file",
    "$100 €50 £20 ¥1000", "!!!???...---___***", "(((())))[[[]]]{{{}}}", "~`@#$%^&*+=|\\/<>",
    "\"quoted\" 'single' “smart” ‘x’",
    "a\u00a0b", "a\u200bb", "a\u3000b", "\ufeffbom", "zero\x00byte", "\x01\x02\x1b[0m", "word\u2028sep\u2029",
    "\x85nel", "x\u0301\u0302\u0303",
    '<html><body class="x">hi</body></html>', "<table><tr><td>x</td></tr></table>", "<h1>Title</h1>", "<0x0A>", "<|im_start",
    "▁", "▁▁", "a▁b", "▁the", " ▁ ", "a" * 100, "ab" * 64, " " * 33, " " * 70 + "x", "\n" * 40,
    "\t" * 20, "=" * 80, "é" * 20,
    "antidisestablishmentarianism", "Donaudampfschifffahrtsgesellschaftskapitän",
    "CamelCaseWord snake_case_word kebab-case",
    "MIXED case WoRdS", "  leading", "trailing  ", "multi\n\n\nline\n text\n", " \t mixed \t ws \n\t",
    "a\n b\n  c\n   d", "a/b\n/\nc!\n\nd",
)  # fmt: skip
"""No text that names a special token of a model."""

SPECIAL = (
    "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", " <|im_end|> ", "a<|im_end|>b",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<bos>hi<eos>", "<pad><unk><mask>",
    "[multimodal]",
    "<unused0> <unused99>", "</s><s>", "<|im_end|>  two", "x <eos>\n",
)  # fmt: skip

_SENTENCE = (
    "the quick brown fox 42 Zürich naïve 東京 привет 😀 foo_bar() != == <b> ▁ ' \" 123456 I'll 's Don't end. (x)"
)
_WORDS = [*_SENTENCE.split(), "", "", "\n", "\t"]
_BLOCKS = (
    (32, 126),
    (32, 126),
    (0xA0, 0x24F),
    (0x370, 0x5FF),
    (0x4E00, 0x4FFF),
    (0x1F300, 0x1F64F),
    (32, 32),
    (10, 10),
)


def random_texts(count: int = 120, seed: int = 0) -> list[str]:
    """Words and characters thrown together, the same every time."""
    rng, texts = random.Random(seed), []
    for _ in range(count // 2):
        texts.append(rng.choice(["", " ", "  "]).join(rng.choices(_WORDS, k=rng.randint(1, 25))))
        characters = [chr(rng.randint(*rng.choice(_BLOCKS))) for _ in range(rng.randint(1, 40))]
        # Libraries of different Unicode versions disagree about characters that are new to one of them.
        texts.append("".join(c for c in characters if unicodedata.category(c) != "Cn"))
    return texts
