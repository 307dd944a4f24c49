"""The form of an answer in LaTeX: numbers, words, a choice, a time of the day, intervals. Texts, no algebra."""

import re
from decimal import Decimal
from fractions import Fraction

FLAGS = re.ASCII | re.IGNORECASE
NUMBER = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"
FRACTION = r"\\[dtc]?frac\s*(?:\{(-?\d{1,99})\}|(\d))\s*(?:\{(-?\d{1,99})\}|(\d))"
PERCENT = r"\s{0,9}\\?(?:%|percent(?:age)?\b|pct\b)"

_SIGN = r"\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?)(?![A-Za-z])|[<>≤≥≠]|!="
_UNIT = r"(?:\\(?:text|mathrm)\s*\{[A-Za-z ]+\}|(?:[kcmn]?m|k?g|h|s|hr?|min|mol|[NJCVAWL]|ft|mi)(?:\^\{?\d\}?)?)"
_WEIGHTY = (
    "not|(?:m|b|tr)illion|thousand|hundred|dozen|squared|cubed|factorial|halves|thirds|quarters|fourths|fifths|tenths"
)
_NO_UNIT = f"{_WEIGHTY}|percent|times|plus|minus|over|divided|choose|sqrt|point|infinity"
# Looks of a formula, units unknown to math-verify, other notations: each pattern with its replacement.
_LOOKS = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}|\\text\s*\{[€£¥₹$]\}|[€£¥₹]", ""),
        (r"\\math(?:bb|bf)\s*(?:R(?![A-Za-z])|\{R\})(?!\s*\^)|(?:\\text\{\s*)?\ball real(?:s| numbers)\b(?:\s*\})?",
         r"(-\\infty,\\infty)"),
        (r"\\(?:displaystyle|[lL]arge|bf|rm|boldsymbol|bm|underline|mathbf|middle)(?![A-Za-z])", ""),
        (r"^(?:\\left)?\\\{\s*[A-Za-z]\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?(?:\\[,;: ]\s*)?(?:\\mid|\\vert|\||:)"
         rf"(?:\\[,;: ])?([^,{{}}]*(?:{_SIGN})[^,]*?)(?:\\right)?\\\}}\Z", r"\1"),
        (r"\\text(?:bf|it|rm|normal)\s*\{", r"\\text{"),
        (r"\\varnothing|(?:\\left)?\\\{\s*(?:\\right)?\\\}", r"\\emptyset"),
        ("<=", r"\\le "),
        (">=", r"\\ge "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"_\{?\\(max|min)(?![A-Za-z])\}?", r"_{\1}"),
        (r"^\\text\s*\{(?![^{}]*\bnot\b)[^{}\d]*(?:\b(?:is|are|equals|about|approximately)|:)\s*\}", ""),
        (rf"(?<=[\d}}])(?:\\[ ,;:]|[\s~]){{0,9}}(?:\\mu\s*(?={_UNIT}\s*\Z)|"
         rf"(?:(?:\\mu\s*)?\\Omega|\\frac\s*\{{{_UNIT}\}}\s*\{{{_UNIT}\}}|"
         r"\\(?:text|mathrm)\s*\{[^{}\d]*\\cdot[^{}\d]*\})\s*\Z)", ""),
        (rf"(?<=\d) {{1,9}}(?!(?:{_NO_UNIT})\b)[A-Za-z]{{4,}}(?: [A-Za-z]{{2,}}){{0,3}}\Z", ""),
    )
]  # fmt: skip
# Digits in groups with spaces between, and a sentence's punctuation within a formula.
_GROUPS = re.compile(r"(?<![\w.,\\])[1-9]\d{0,2}(?:(?:\\[,;: ]|[~ ])\d{3})+(?!\d)")
_PUNCTUATION = re.compile(r"(?<=[^\s.,;:\\{(\[&])\s{0,9}[.,;](?=\s{0,9}(?:\$|\\[)\]]|\}|$))")

_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|rm|operatorname)\s*\{([^{}]*)\}")
_NOTHING = re.compile(r"(?<!\\)\\(?:left|right|!\s*|displaystyle|\$|[()\[\]])|\$|\^\{?\\circ\}?|°")
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad)|~")
_RELATION = re.compile(_SIGN)
_SEPARATOR = re.compile(
    r"\\(?:begin|end)\{\w*\}(?:\{\w*\})?|[,;](?!\d{3}(?!\d))|&|\\\\|\\cup|\\[{}]|[{}()\[\]]|\b(?:and|or)\b|"
    rf"\\(?:in|setminus)(?![A-Za-z])|∈|{_SIGN}"
)
_LIST = re.compile(r"[,;](?!\d{3}(?!\d))|\b(?:and|or)\b")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_PRODUCT = re.compile(r"\d\s*[(\[{]|[)\]]\s*[\d(\[]|(?<!\\)\}\s*\{|\\end\{\w*\}\s*\\begin")
_ENVIRONMENT = re.compile(r"(\\(?:begin|end)\{\w*\})(?:\{\w*\})?")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(
    rf"(?:\\pm|±)?\s*[-+]?\s*(?P<number>(?:\d+\s+)?(?P<over>\d+)\s*[/:]\s*(?P<under>\d+)|"
    rf"{_DIGITS}\s*[-+]\s*(?:{_DIGITS})?i|(?:{_DIGITS})?i(?:\s*[-+]\s*{_DIGITS})?|"
    rf"{_DIGITS}\s*(?:\\times|\\cdot|[×·*])\s*10\^(?:-\d|[4-9]|\d\d)\d*|{_DIGITS}(?:e[+-]?\d+)?|\\infty|∞)\s*(?:\\?%)?"
    r"(?P<unit>\s+[a-z][a-z/.·\s^²³\d]*|(?:[ckm]m|[km]g|ml|ft|lbs?|km/h|mph|min)(?:\^?[23²³])?)?",
    FLAGS,
)
_NAME = re.compile(r"-?[A-Za-z][\w' ]*|[_']*")
# The part of a left side that names the value: a command, a subscript, an argument.
_NAMING = re.compile(r"\\[A-Za-z]+|_(?:\{[^{}]*\}|\w)|\^\{-1\}(?=\()|(?<=[A-Za-z}'])\([^()]*\)")
# No possessive quantifier here or anywhere: before 3.11.5, Python matches possessive groups wrongly.
_ARITHMETIC = re.compile(r"(?:\\(?!circ)[A-Za-z]+_?|[-+*/^()\[\]{}|!.,\d\s×·])*")
# A number times a variable: no unit, if the row's answer has it.
_MULTIPLE = re.compile(r"[\d}]\s*[A-Za-z](?![A-Za-z])")
# Work left to the reader, unless the row's answer leaves the same work.
_OPERATION = re.compile(
    r"\\(?:sum|prod|i*int|lim|binom|[dt]binom|det|gcd|lcm|max|min|[bp]?mod|log|ln|lg|exp|a?(?:rc)?(?:sin|cos|tan)h?|"
    r"cot|sec|csc|lfloor|lceil|overline)(?![a-z])|!|\\frac\{d\}|\b(?:log|ln|sin|cos|tan|arctan|gcd|lcm|max|min)\b"
)
_EXPRESSION = re.compile(r"[-+*/^=<>|!]|\\(?!text|mathrm|mbox|mathbf|infty|pi\b)[a-z]+")
_ROOT = re.compile(r"-?\d*\\sqrt(?:\[\d\])?\{?\d+\}?")
# Words, in which the order of letters counts: three letters, capitals, the shortest words, or marked text.
_IN_WORDS = re.compile(
    r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z .,;'!?-]*|[A-Z]{2,}|(?i:no|on|up|in|it|us|we|he|so|to|of|if|go|at)\.?|"
    r"\\text\{(?=[^{}]*[A-Za-z]{2})[^{}]*\}\.?"
)
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:[(\[{]\s*([A-J])\s*[)\]}]|([A-J])(?=$|[).:]))[).:\s]*"
    r"((?![=^_<>+*/,;]|\\(?:c[au]p|in|[lg]eq?|times|cdot)\b|(?:and|or)\b)(?:(?!\b[A-J]\b).)*)"
)
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*(?:([ap])\.?\s?m\.?)?", FLAGS)
_BASE = re.compile(r"\d_\{?(\d+)\}?\Z")


def tidy(latex: str) -> str:
    """Return a formula without mere looks, without spaces within numbers, and without punctuation at the end."""
    if re.fullmatch(r"-?[0-9,.]*[0-9]", latex):  # as most answers are
        return latex
    latex = ascii_digits(latex)
    for pattern, instead in _LOOKS:
        latex = pattern.sub(instead, latex)
    return _PUNCTUATION.sub("", _joined_digits(latex)).strip()


def ascii_digits(text: str) -> str:
    """Return the text with the digits of every script as ASCII digits."""
    return re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)


def _joined_digits(latex: str) -> str:
    return _GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), latex)


def plain(latex: str) -> str:
    """Return LaTeX without commands for text, spaces and sizes."""
    text = _SPACE.sub(" ", _NOTHING.sub("", _TEXT.sub(r" \1 ", _joined_digits(latex))))
    return text.replace("{,}", ",").replace("−", "-").strip()


def _fractions(latex: str) -> str:
    return re.sub(FRACTION, lambda match: " {}/{} ".format(*filter(None, match.groups())), latex)


def choice(latex: str) -> tuple[str | None, str]:
    """Return the letter of a choice (None without a letter) and the text beside: ("B", "12") for `(B) 12`."""
    match = _CHOICE.fullmatch(plain(latex))
    return (match[1] or match[2], match[3].strip()) if match else (None, latex)


def same_words(gold: str, latex: str) -> bool | None:
    """Whether an answer has the same words, time of the day or number base as the row's answer; None if the row's
    answer has none of the three, and algebra has to tell."""
    times = [_TIME.fullmatch(plain(text)) for text in (gold, latex)]
    times = [time if time and (time[2] or time[3]) else None for time in times]
    if any(time and (time[3] or (time[2] or "").startswith("0")) for time in times):
        if not (times[0] and times[1]):
            return False if times[0] else None
        return bool(_hours(times[0]) & _hours(times[1])) and (times[0][2] or "00") == (times[1][2] or "00")
    if (base := _BASE.search(gold)) and (latex_base := _BASE.search(latex)) and base[1] != latex_base[1]:
        return False
    if not _IN_WORDS.fullmatch(gold.strip()):
        return None
    words, gold_words = (re.sub(r"[\W_]+", " ", plain(text)).strip().casefold() for text in (sides(latex)[-1], gold))
    return words == gold_words


def _hours(time: re.Match[str]) -> set[int]:
    """Return the hours of the day, from 0 to 24, that a time may mean."""
    hour, half = int(time[1]), (time[3] or "").lower()
    return {hour % 12 + 12 * (half == "p")} if half else {hour} if hour > 12 else {hour % 12, hour % 12 + 12}


def sides(latex: str) -> list[str]:
    """Return the sides of an equation; the last is the answer, without its subject. Several answers are one side."""
    if _LIST.search(re.sub(r"\([^()]*\)", "", latex)):
        return [latex]
    exact, *about = re.split(r"\\approx(?![A-Za-z])|≈", latex)
    names = [side.strip() for side in _EQUALS.split(exact)]
    return [*names, about[-1].strip()] if about and not is_arithmetic(names[-1]) else names


def is_unsolved(side: str) -> bool:
    """Whether the left side of an equation is a term in one variable, still to be solved for: `2x`."""
    term = _NAMING.sub("", side)
    return len(set(re.findall("[A-Za-z]", term))) == 1 and bool(re.search(r"\d|^\s*-", term))


def is_arithmetic(side: str) -> bool:
    """Whether a side of an equation is made of numbers."""
    return bool(re.search(r"\d", side) and _ARITHMETIC.fullmatch(side))


def count(latex: str) -> int | None:
    """Return the number of answers in a list without brackets; None for anything else."""
    text = plain(latex)
    if re.search(r"\d_|[()\[\]&±]|\\(?:pm|cup|begin|in)(?![A-Za-z])", text) or _RELATION.search(text):
        return None
    return sum(bool(piece.strip()) for piece in _LIST.split(text))


def is_relation(latex: str) -> bool:
    """Whether an answer has an inequality."""
    return bool(_RELATION.search(latex))


def intervals(latex: str) -> tuple[str, str] | None:
    """Return a variable and its intervals, by inequalities; None for anything else."""
    names, parts = set(), []
    for part in re.split(r"\bor\b|\\lor\b|\\vee\b", plain(latex)):
        terms, low, high = [side.strip() for side in _RELATION.split(part)], "(-\\infty", "\\infty)"
        for term, sign, following in zip(terms, _RELATION.findall(part), terms[1:], strict=False):
            is_first = re.fullmatch("[A-Za-z]", term)
            name, bound = (term, following) if is_first else (following, term)
            if not re.fullmatch("[A-Za-z]", name) or name in bound or not bound:
                return None
            names.add(name)
            if sign in ("\\ne", "\\neq", "≠", "!="):
                low, high = f"(-\\infty,{bound})\\cup({bound}", "\\infty)"
            elif bool(is_first) is (sign[:2] == "\\l" or sign in "<≤"):
                high = bound + (")" if sign in ("<", ">", "\\lt", "\\gt") else "]")
            else:
                low = ("(" if sign in ("<", ">", "\\lt", "\\gt") else "[") + bound
        parts.append(f"{low},{high}")
    return (names.pop(), "\\cup".join(parts)) if len(names) == 1 else None


def numbers(latex: str) -> list[str] | None:
    """Return the numbers of an answer made of numbers (`x = \\frac{1}{2}`, `(0, 5]`, `72 cm`); else None."""
    text = re.sub(r"10\^\{(-?\d+)\}", r"10^\1", plain(_fractions(latex)))
    if _PRODUCT.search(_ENVIRONMENT.sub(r"\1", text)):
        return None
    is_relation, literals = bool(_RELATION.search(text)), []
    for piece in filter(str.strip, _SEPARATOR.split(text)):
        *left_sides, value = sides(piece)
        if any(map(is_unsolved, left_sides)):
            return None
        literal = _LITERAL.fullmatch(value.strip())
        if literal is None and _NAME.fullmatch(value.strip()):
            continue
        if literal is None or (is_relation and literal["unit"]):
            return None
        if literal["under"] and (not int(literal["under"]) or int(literal["over"]) % int(literal["under"]) == 0):
            return None
        literals.append(literal["number"])
    return literals or None


def is_answered(latex: str, gold: str, prompt: str = "") -> bool:
    """Whether an answer has the form of the row's answer: for a number, a number, and no arithmetic, function or
    equation that has to be worked out first. Text from the prompt must be written as the row's answer is."""
    if _bare(latex) == _bare(gold):
        return True
    # 1,22 may be 1.22.
    amounts = count(latex), count(re.sub(r"(?<=\d),(?=\d)", ".", gold) if "." in latex else gold)
    if (None not in amounts and amounts[0] != amounts[1]) or _weighty(latex) != _weighty(gold):
        return False
    if (amounts[1] == 1 or plain(gold)[0] == "(") and "\\{" not in gold and plain(latex).startswith("\\{"):
        return False  # a set is neither its element nor a vector
    values, gold_values = numbers(latex), None if _MULTIPLE.search(_TEXT.sub("", gold)) else numbers(gold)
    unfinished = values is None or any(re.search("[/:^]", number) for number in values)
    parts = [part.rpartition("=")[2].strip(" ()") for part in re.split(r"≈|\\approx", latex)]
    if unfinished and any(_EXPRESSION.search(part) and stands_in(prompt, part) for part in parts):
        return False
    if gold_values is None:
        return bool(_OPERATION.search(gold)) or not _OPERATION.search(sides(latex)[-1])
    if values is None and len(gold_values) == 1 and re.fullmatch(r"\d*\.\d{6,}", gold_values[0]):
        # A decimal in place of a root.
        return bool(_ROOT.fullmatch(latex.strip())) and _values(latex).isdisjoint(_values(prompt))
    return values is not None


def _weighty(latex: str) -> set[str]:
    return set(re.findall(rf"\b(?:{_WEIGHTY})\b|n['’]t\b", plain(latex).lower()))


def rounded(latex: str, gold: str) -> str:
    """Return an answer with the row's endless fractions in place of their decimals: 1/3 for 0.33, not for 0.3."""
    fractions = [Fraction(*map(int, re.split("[/:]", number))) for number in numbers(gold) or () if _is_endless(number)]

    def exact(decimal: re.Match[str]) -> str:
        for fraction in fractions:
            step = Decimal(1).scaleb(-len(decimal[0].partition(".")[2]))
            if abs(Fraction(decimal[0]) - fraction) <= Fraction(step) / 2 and len(decimal[0].strip("0.")) >= 2:
                return rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}"
        return decimal[0]

    return re.sub(r"(?<![\d.])\d*\.\d{2,40}(?![\d.])", exact, latex) if fractions else latex


def _is_endless(number: str) -> bool:
    if not re.fullmatch(r"\d{1,40}[/:]\d{1,40}", number):
        return False
    under = Fraction(*map(int, re.split("[/:]", number))).denominator
    return pow(10, under.bit_length(), under) != 0


def stands_in(prompt: str, text: str) -> bool:
    """Whether a number (or the other side of an equation) or a formula stands in the prompt."""
    if not prompt:
        return False
    bare = _bare(text)
    if re.fullmatch(_DIGITS, bare.removeprefix("-").rstrip("%"), FLAGS):
        return not _values(bare).isdisjoint(_values(prompt))
    _, equals, bare = bare.rpartition("=")
    if re.fullmatch(_DIGITS, bare, FLAGS):
        bare = equals + bare
    return bool(re.search(rf"{r'(?<![0-9.])' * bare[:1].isdigit()}{re.escape(bare)}(?![0-9])", _bare(prompt)))


def _values(text: str) -> set[Decimal]:
    return {Decimal(number.replace(",", "")) for number in re.findall(_DIGITS, plain(text))}


def _bare(latex: str) -> str:
    """Return LaTeX without spaces, braces and other differences of notation."""
    return re.sub(r"[\s{}$]", "", re.sub(r"\\[dtc]frac", r"\\frac", plain(_fractions(latex))))
