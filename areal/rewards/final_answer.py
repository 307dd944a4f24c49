r"""Where a text gives its final answer, and what kind of answer that is. Texts only, no algebra.

An answer counts where it is given as one. In this order:

1. in the last `\boxed{}`, or in the last ones if words such as "and" join them;
2. after `####`, "the answer is", "Answer:", "Final answer:" or a line's `A:`: the formula or number that follows at
   once, or else the last one of that sentence, if it does not stand in the prompt;
3. otherwise the last formula or number of the text, if it does not stand in the prompt or is all of the text.

Outside of formulas only a number is an answer. `4 - 1` is arithmetic that still has to be done.

A model writes these texts, and is paid for what is found in them: all is read in time that grows with their length.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

MARK = "####"

_FLAGS = re.ASCII | re.IGNORECASE
_NUMBER = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"
_FRACTION = r"\\[dtc]?frac\s*(?:\{(-?\d{1,99})\}|(\d))\s*(?:\{(-?\d{1,99})\}|(\d))"
_PERCENT = r"\s{0,9}\\?(?:%|percent(?:age)?\b|pct\b)"
# Formulas, formulas broken over lines (which nothing reads), numbers, and what makes an expression of numbers.
_TOKEN = re.compile(
    rf"""(?P<formula>
        \$\$ (?P<a> [^$]{{1,4000}} ) \$\$ | \\\[ (?P<b> (?:[^\\]|\\(?![\[\]])){{1,4000}}+ ) \\\]
        | (?<!\\)\$ (?![\d.,]+(?:\s+[a-z]{{2}}|\s*[-+*/x=]?\s*\$[\d.])) (?P<c> (?:\\\$|[^\n$]){{1,1000}}+ ) \$
        | \\\( (?P<d> (?:[^\\\n]|\\(?![()])){{1,1000}}+ ) \\\) )  (?P<percent> {_PERCENT} )?
    | (?P<broken> \$[ \t]*\n[^$]{{0,999}}+\$ | \\\([ \t]*\n(?:[^\\]|\\(?![()])){{0,999}}+\\\) )
    | (?P<number> {_FRACTION} | (?<![a-z_\\\d,])[$€£¥]?{_NUMBER}(?:e[+-]?\d{{1,9}})?(?:{_PERCENT})? )
    | (?P<sign> [-−+*/^×÷·=≈]+ | \((?=\s*[-−\d.$(]) | (?<=[\d)])\) | (?<=[\d ])x(?=\ ?[$\d])
        | \b(?:plus|minus|times|divided\ by|multiplied\ by)\b )""",
    _FLAGS | re.VERBOSE,
)
_PLAIN = re.compile(rf"-?(?:{_NUMBER}(?:/\d+)?|\d+ \d+/\d+|{_FRACTION}|{_NUMBER}e[+-]?\d+)(?:{_PERCENT})?", _FLAGS)
_ANCHOR = re.compile(
    r"####|\banswers?\b[^.\n:=$\d]{0,80}?(?:\b(?:is|are|be|equals)\b:?|:|=|\W{0,6}\n)|^a:", _FLAGS | re.MULTILINE
)
# The form of Minerva's prompt. After a box it counts, and not the box.
_HOPE = re.compile(r"final answer is.{1,400}?I hope", _FLAGS | re.DOTALL)
# Between an anchor and what it announces: signs, and the name of a variable.
_DIRECT = re.compile(r"\W*(?:[A-Za-z](?:_\{?\w\}?|\d)?\W*)?")
_SENTENCE_END = re.compile(r"[.!?]\s|\n")
# The longest way from an anchor to its answer, in characters.
_REACH = 400
_BETWEEN_FORMULAS = re.compile(r"\s*(?:,?\s*(?:and|or)|,)\s*")
_BETWEEN_NUMBERS = re.compile(r"\s*,?\s*(?:and|or)\s*(?:[a-z](?:\(\w\)?)?\s*)?", re.IGNORECASE)
# In texts that were escaped once too often.
_DOUBLED = re.compile(r"(?<!\\)\\(?=\\(?:boxed|text|frac|sqrt|left|right)\b)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\\\|\\[{}]|[{}]")
# Also the formulas that boxes stand in, and the left side of an equation.
_BETWEEN_BOXES = re.compile(r"(?:[^.!?\n]{0,40}\b(?:and|or)|,|;)?\s*(?:[\w_{}]{1,20}\s*=)?\s*")
# Digits in groups with spaces between them, and the punctuation of a sentence that stands in its formula.
_GROUPS = re.compile(r"(?<![\w.,\\])[1-9]\d{0,2}(?:(?:\\[,;: ]|[~ ])\d{3})+(?!\d)")
_PUNCTUATION = re.compile(r"(?<=[^\s.,;:\\{(\[&])\s{0,9}[.,;](?=\s{0,9}(?:\$|\\[)\]]|\}|$))")
_AFTER_BOX = re.compile(rf"[\s$\\)\]]{{0,9}}{_PERCENT}", _FLAGS)


class Candidate(NamedTuple):
    """A formula or a run of numbers and signs. `content`: as LaTeX; None if it is no answer."""

    start: int
    end: int
    content: str | None
    is_formula: bool


def extract(text: str, prompt: str = "") -> str | None:
    """The final answer of a text, as LaTeX; None if it gives none."""
    text = _DOUBLED.sub("", text)
    boxes = [box for box in _boxes(text) if box[2].strip()]
    if boxes and (later := _HOPE.search(text, boxes[-1][1])):
        text, boxes = text[later.start() :], []
    if boxes:
        return _last_boxes(text, boxes)
    candidates = _joined(text, _candidates(text))
    if not candidates:
        return None
    starts = [candidate.start for candidate in candidates]
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        first = bisect_left(starts, anchor.end())
        between = text[anchor.end() : starts[first]] if first < len(candidates) else None
        if between is None or len(between) > _REACH:
            continue
        if _DIRECT.fullmatch(between):
            return _list(text, candidates[first:])
        # A heading may begin with #### too.
        if anchor[0] != MARK and not _SENTENCE_END.search(between.strip()):
            return _unless_in(prompt, text, _last_of_sentence(text, candidates[first:]))
    is_all = not re.search(r"\w", text[: candidates[-1].start] + text[candidates[-1].end :])
    return candidates[-1].content if is_all else _unless_in(prompt, text, candidates[-1])


def tidy(latex: str) -> str:
    """A formula without the spaces within its numbers, and without the punctuation at its end."""
    return _PUNCTUATION.sub("", _joined_digits(latex))


def _joined_digits(latex: str) -> str:
    return _GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), latex)


def _last_of_sentence(text: str, candidates: Sequence[Candidate]) -> Candidate:
    last = candidates[0]
    for candidate in candidates[1:]:
        if _SENTENCE_END.search(text, last.end, candidate.start):
            break
        last = candidate
    return last


def _list(text: str, candidates: Sequence[Candidate]) -> str | None:
    """What the first candidate says, with those that follow it after a comma each."""
    count = 1
    while count < len(candidates) and _BETWEEN_FORMULAS.fullmatch(
        text, candidates[count - 1].end, candidates[count].start
    ):
        count += 1
    return _all_of(candidates[:count])


def _all_of(candidates: Sequence[Candidate]) -> str | None:
    contents = [candidate.content for candidate in candidates]
    return None if None in contents else ", ".join(map(str, contents))


def _unless_in(prompt: str, text: str, candidate: Candidate) -> str | None:
    return None if stands_in(prompt, text[candidate.start : candidate.end]) else candidate.content


def _candidates(text: str) -> Iterator[Candidate]:
    run: list[re.Match[str]] = []
    for token in _TOKEN.finditer(text):
        if run and (token["formula"] or token["broken"] or text[run[-1].end() : token.start()].strip(" \t*\u00a0")):
            yield from _run(text, run)
            run = []
        if token["formula"]:
            inside = token["a"] or token["b"] or token["c"] or token["d"]
            content = tidy(inside.strip()) + "\\%" * bool(token["percent"])
            yield Candidate(token.start(), token.end(), content, True)
        elif token["broken"]:
            yield Candidate(token.start(), token.end(), None, True)
        else:
            run.append(token)
    yield from _run(text, run)


def _run(text: str, tokens: Sequence[re.Match[str]]) -> Iterator[Candidate]:
    """A run of numbers and signs: what it says after its last `=`, if that is a number."""
    if not any(token["number"] for token in tokens):
        return
    start, end = tokens[0].start(), tokens[-1].end()
    run = text[start:end]
    if start == 0 or text[start - 1] == "\n":
        run = re.sub(r"^[-*+] ", "", run)  # an item of a list
    value = re.split(r"[=≈]", re.sub(r"(?<!\d)\*\*|\*\*(?!\d)|[$€£¥]", "", run))[-1]
    value = re.sub(r"^\*(?=\S)|\*$", "", value.strip(" \t\u00a0")).replace("−", "-").strip("()")
    yield Candidate(start, end, _number_as_latex(value) if _PLAIN.fullmatch(value) else None, False)


def _number_as_latex(number: str) -> str:
    number = re.sub(rf"{_PERCENT}$", r"\\%", number, flags=_FLAGS)
    if "frac" in number:
        return number
    if re.match(r"-?[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)", number):
        return re.sub(r"[, ](?=\d{3})", "", number)
    return number.replace(",", ".")


def _joined(text: str, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, where those that "and" or "or" joins are one: several answers."""
    joined: list[Candidate] = []
    for candidate in candidates:
        between = _BETWEEN_FORMULAS if candidate.is_formula else _BETWEEN_NUMBERS
        if (
            joined
            and joined[-1].is_formula == candidate.is_formula
            and between.fullmatch(text, joined[-1].end, candidate.start)
        ):
            last = joined.pop()
            candidate = Candidate(last.start, candidate.end, _all_of([last, candidate]), last.is_formula)
        joined.append(candidate)
    return joined


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of the outermost boxes. One that is not closed reaches to the end of the text."""
    boxes: list[tuple[int, int, str]] = []
    depth, outer = 0, None
    for brace in _BRACE.finditer(text):
        if brace[0] == "}":
            depth -= 1
            if outer and depth == outer[1]:
                boxes.append((outer[0].start(), brace.end(), text[outer[0].end() : brace.start()]))
                outer = None
        elif brace[0].endswith("{") and brace[0] != "\\{":
            if outer is None and brace[0] != "{":
                outer = brace, depth
            depth += 1
    if outer:
        boxes.append((outer[0].start(), len(text), text[outer[0].end() :]))
    return boxes


def _last_boxes(text: str, boxes: Sequence[tuple[int, int, str]]) -> str:
    first = len(boxes) - 1
    while first and _BETWEEN_BOXES.fullmatch(_words(text[boxes[first - 1][1] : boxes[first][0]][:200])):
        first -= 1
    percent = "\\%" * bool(_AFTER_BOX.match(text, boxes[-1][1]))
    content = ", ".join(tidy(content.strip()) for _, _, content in boxes[first:])
    return re.sub(r"\\(?:boxed|fbox)\s*\{", "{", re.sub(r"\\?\$", "", content)).strip() + percent


# --- kinds of answers

_WORDS = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|rm|operatorname)\s*\{([^{}]*)\}")
_NOTHING = re.compile(r"(?<!\\)\\(?:left|right|!\s*|displaystyle|\$|[()\[\]])|\$|\^\{?\\circ\}?|°")
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad)|~")
_SEPARATOR = re.compile(
    r"\\(?:begin|end)\{\w*\}(?:\{\w*\})?|[,;](?!\d{3}(?!\d))|&|\\\\|\\cup|\\[{}]|[{}()\[\]]|\b(?:and|or)\b|"
    r"\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|in|approx)(?![A-Za-z])|[<>≤≥≠≈∈]|!="
)
_RELATION = re.compile(r"\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?)(?![A-Za-z])|[<>≤≥≠]|!=")
_PRODUCT = re.compile(r"\d\s*[(\[{]|[)\]]\s*[\d(\[]|(?<!\\)\}\s*\{|\\end\{\w*\}\s*\\begin")
_ENVIRONMENT = re.compile(r"(\\(?:begin|end)\{\w*\})(?:\{\w*\})?")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_LITERAL = re.compile(
    rf"(?:\\pm|±)?\s*[-+]?\s*(?P<number>(?:\d+\s+)?(?P<over>\d+)\s*[/:]\s*(?P<under>\d+)|"
    rf"{_DIGITS}\s*[-+]\s*(?:{_DIGITS})?i|(?:{_DIGITS})?i(?:\s*[-+]\s*{_DIGITS})?|"
    rf"{_DIGITS}\s*(?:\\times|\\cdot|[×·*])\s*10\^(?:-\d|[4-9]|\d\d)\d*|{_DIGITS}(?:e[+-]?\d+)?|\\infty|∞)\s*(?:\\?%)?"
    r"(?P<unit>\s+[a-z][a-z/.·\s^²³\d]*|(?:[ckm]m|[km]g|ml|ft|lbs?|km/h|mph|min)(?:\^?[23²³])?)?",
    _FLAGS,
)
_NAME = re.compile(r"-?[A-Za-z][\w' ]*|[_']*")
# A number times a variable, which in the row's answer is no unit.
_MULTIPLE = re.compile(r"[\d}]\s*[A-Za-z](?![A-Za-z])")
_LEFT_SIDE = re.compile(r"[^A-Za-z]*|\\?[A-Za-z|][\w\\|:' ]*")
# Work that is left to the reader, unless the row's answer is written so too.
_OPERATION = re.compile(
    r"\\(?:sum|prod|i*int|lim|binom|[dt]binom|det|gcd|lcm|max|min|[bp]?mod|log|ln|lg|exp|a?(?:rc)?(?:sin|cos|tan)h?|"
    r"cot|sec|csc|lfloor|lceil|overline)(?![a-z])|!|\\frac\{d\}|\b(?:log|ln|sin|cos|tan|arctan|gcd|lcm|max|min)\b"
)
_EXPRESSION = re.compile(r"[-+*/^=<>|!]|\\(?!text|mathrm|mbox|mathbf|infty|pi\b)[a-z]+")
_ROOT = re.compile(r"-?\d*\\sqrt(?:\[\d\])?\{?\d+\}?")


def _words(latex: str) -> str:
    """LaTeX without what only says how it looks."""
    text = _SPACE.sub(" ", _NOTHING.sub("", _WORDS.sub(r" \1 ", _joined_digits(latex))))
    return text.replace("{,}", ",").replace("−", "-").strip()


def _fractions(latex: str) -> str:
    return re.sub(_FRACTION, lambda match: " {}/{} ".format(*filter(None, match.groups())), latex)


def numbers(latex: str) -> list[str] | None:
    """The numbers of an answer that is one or more numbers and no arithmetic (`x = \\frac{1}{2}`, `(0, 5]`, `72 cm`);
    None for any other."""
    text = re.sub(r"10\^\{(-?\d+)\}", r"10^\1", _words(_fractions(latex)))
    if _PRODUCT.search(_ENVIRONMENT.sub(r"\1", text)):
        return None
    is_relation, literals = bool(_RELATION.search(text)), []
    for piece in filter(str.strip, _SEPARATOR.split(text)):
        *left_sides, value = piece.split("=")
        if not all(_LEFT_SIDE.fullmatch(side.strip()) for side in left_sides):
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
    """Whether an answer has the form that the row's answer asks for: where that is a number, a number, and no
    arithmetic, function or equation that has to be worked out first. What stands in the prompt must be written as the
    row's answer is."""
    if _bare(latex) == _bare(gold):
        return True
    values, gold_values = numbers(latex), None if _MULTIPLE.search(_WORDS.sub("", gold)) else numbers(gold)
    unfinished = values is None or any(re.search("[/:^]", number) for number in values)
    sides = [part.rpartition("=")[2].strip(" ()") for part in re.split(r"≈|\\approx", latex)]
    if unfinished and any(_EXPRESSION.search(side) and stands_in(prompt, side) for side in sides):
        return False
    if gold_values is None:
        return bool(_OPERATION.search(gold)) or not _OPERATION.search(latex)
    if values is None and len(gold_values) == 1 and re.fullmatch(r"\d*\.\d{6,}", gold_values[0]):
        # A decimal that stands for a root.
        return bool(_ROOT.fullmatch(latex.strip())) and _values(latex).isdisjoint(_values(prompt))
    return values is not None


def is_solved(latex: str) -> bool:
    """Whether inequalities say of a variable alone between what it is."""
    sides = [re.sub(r"\\[a-z]+", "", side).strip() for side in _RELATION.split(_words(latex))]
    return [len(side) for side in sides if re.search("[A-Za-z]", side)] == [1]


def rounded(latex: str, gold: str) -> str:
    """An answer in which the row's fractions stand for their decimals, which have no end: 1/3 for 0.33, not for 0.3."""
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
    """Whether a number (or what is said to equal something) or a formula is one of the prompt's."""
    if not prompt:
        return False
    bare = _bare(text)
    if re.fullmatch(_DIGITS, bare.removeprefix("-").rstrip("%"), _FLAGS):
        return not _values(bare).isdisjoint(_values(prompt))
    _, equals, bare = bare.rpartition("=")
    if re.fullmatch(_DIGITS, bare, _FLAGS):
        bare = equals + bare
    return bool(re.search(rf"{r'(?<![0-9.])' * bare[:1].isdigit()}{re.escape(bare)}(?![0-9])", _bare(prompt)))


def _values(text: str) -> set[Decimal]:
    return {Decimal(number.replace(",", "")) for number in re.findall(_DIGITS, _words(text))}


def _bare(latex: str) -> str:
    """What is left of LaTeX without spaces, braces and other forms of the same."""
    return re.sub(r"[\s{}$]", "", re.sub(r"\\[dtc]frac", r"\\frac", _words(_fractions(latex))))
