r"""Finds the final answer in a text. Texts only, no algebra.

An answer counts only if the text gives it as an answer. In this order:

1. in the last `\boxed{}`, or in the last boxes if words such as "and" join them;
2. after `####`, "the answer is", "Answer:", "Final answer:" or a line's `A:`: the letter, formula or number that
   follows at once, or else the last of the sentence, if it does not stand in the prompt;
3. otherwise the last formula or number of the text, if it does not stand in the prompt or is all of the text.

Outside of formulas only a number or a letter is an answer, not `4 - 1`. A denied answer is no answer.

A model writes these texts, and is rewarded for the found answer: reading takes time in proportion to the length.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from areal.extensions.math.answer_forms import FLAGS, FRACTION, NUMBER, PERCENT, ascii_digits, plain, stands_in, tidy

MARK = "####"

# Formulas, formulas broken over lines (which nothing reads), numbers, and the signs of arithmetic.
_TOKEN = re.compile(
    rf"""(?P<formula>
        \$\$ (?P<a> [^$]{{1,4000}} ) \$\$ | \\\[ (?P<b> (?:[^\\]|\\(?![\[\]])){{1,4000}} ) \\\]
        | (?<!\\)\$ (?![\d.,]+(?:\s+[a-z]{{2}}|\s*[-+*/x=]?\s*\$[\d.])) (?P<c> (?:[^\n$\\]|\\\$|\\(?!\$)){{1,1000}} ) \$
        | \\\( (?P<d> (?:[^\\\n]|\\(?![()])){{1,1000}} ) \\\) )  (?P<percent> {PERCENT} )?
    | (?P<broken> \$[ \t]*\n[^$]{{0,999}}\$ | \\\([ \t]*\n(?:[^\\]|\\(?![()])){{0,999}}\\\) )
    | (?P<number> {FRACTION} | (?<![a-z_\\\d,])[$€£¥]?{NUMBER}(?:e[+-]?\d{{1,9}})?(?:{PERCENT})? )
    | (?P<sign> [-−+*/^×÷·=≈]+ | \((?=\s*[-−\d.$(]) | (?<=[\d)])\) | (?<=[\d ])x(?=\ ?[$\d])
        | \b(?:plus|minus|times|divided\ by|multiplied\ by)\b )""",
    FLAGS | re.VERBOSE,
)
_PLAIN = re.compile(rf"-?(?:{NUMBER}(?:/\d+)?|\d+ \d+/\d+|{FRACTION}|{NUMBER}e[+-]?\d+)(?:{PERCENT})?", FLAGS)
_ANCHOR = re.compile(
    r"####|\b(?:answers?|correct (?:option|choice))\b[^.\n:=$\d]{0,80}?"
    r"(?:\b(?:is|are|be|equals)\b:?|:|=|\W{0,6}\n)|^a:",
    FLAGS | re.MULTILINE,
)
# The form of Minerva's prompt. After a box it counts in place of the box.
_HOPE = re.compile(r"final answer is.{1,400}?I hope", FLAGS | re.DOTALL)
# Between an anchor and its answer: signs, and the name of a variable.
_DIRECT = re.compile(r"\W*(?:[A-Za-z](?:_\{?\w\}?|\d)?\W*)?")
_SENTENCE_END = re.compile(r"[.!?]\s|\n")
# The letter of a choice after an anchor, if it is the only letter, and no word of a sentence.
_LETTER = re.compile(
    r"\W{0,12}(?:\b(?i:(?:math|text)(?:bf|rm|it)?|option|choice)\W{1,3})?\b([A-J])(?![\w'’]|\W{0,3}\?)"
    r"(?!\W{0,3}[,/&;+]\W{0,3}[A-J]\b|\W{1,4}(?i:and|or)\W{1,4}(?:[A-J]|not)\b)"
    r"(?=\W{0,12}\Z|[])}.:,;!*$\\\"']|\s{0,9}\n|\s+(?:because\b|since\b|[(-]))"
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot|(?:rather|other) than|instead of)|n['’]t)"
    r"(?: (?:be|equal(?: to)?|exactly))?[\s$*(\\]{0,5}\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\s$*)\\,\"'”]{0,5}(?:or not\b|\?\s*no\b|(?:is|was)(?:n['’]t| not) (?:it|right|correct|true|the answer)\b|"
    r"is (?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)
# The longest way from an anchor to its answer, in characters.
_REACH = 400
_BETWEEN_FORMULAS = re.compile(r"\s*(?:,?\s*(?:and|or)|,)\s*")
_BETWEEN_NUMBERS = re.compile(r"\s*,?\s*(?:and|or)\s*(?:[a-z](?:\(\w\)?)?\s*)?", re.IGNORECASE)
# In texts that were escaped twice.
_DOUBLED = re.compile(r"(?<!\\)\\(?=\\(?:boxed|text|frac|sqrt|left|right|[gl]eq?)\b)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\\\|\\[{}]|[{}]")
# Before an empty box that stands for the word box, and is no answer; and the longest way from the word to the box.
_MENTION = re.compile(r"\b(?:in|into|inside|within|using|with|an?|the)\Z", re.IGNORECASE)
_MENTION_REACH = 40
# Formulas around boxes, and the left side of an equation, included.
_BETWEEN_BOXES = re.compile(r"(?:[^.!?\n]{0,40}\b(?:and|or)|[^\w.!?\n]{0,20})\s*(?:[\w_{}]{1,20}\s*=)?\s*")
_AFTER_BOX = re.compile(rf"[\s$\\)\]]{{0,9}}{PERCENT}", FLAGS)


class Candidate(NamedTuple):
    """A formula or a run of numbers and signs. `content`: as LaTeX; None for no answer."""

    start: int
    end: int
    content: str | None
    is_formula: bool


def extract(text: str, prompt: str = "") -> str | None:
    """Return the final answer of a text, as LaTeX; None if the text gives no answer.

    >>> extract("So 3 apples are left. The answer is 5.")
    '5'"""
    text = _DOUBLED.sub("", ascii_digits(text))
    boxes = [box for box in _boxes(text) if box[2].strip() or not _is_mention(text, box[0])]
    if boxes and (later := _HOPE.search(text, boxes[-1][1])):
        text, boxes = text[later.start() :], []
    if filled := [box for box in boxes if box[2].strip()]:
        return _last_boxes(text, filled) if filled[-1] is boxes[-1] else None  # an empty box takes the answer back
    candidates = _joined(text, (part for part in _candidates(text) if not _is_denied(text, part.start, part.end)))
    starts = [candidate.start for candidate in candidates]
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        first = bisect_left(starts, anchor.end())
        between = text[anchor.end() : starts[first]] if first < len(candidates) else None
        if letter := _LETTER.match(text, anchor.end()):
            value = candidates[bisect_left(starts, letter.end()) :][:1]
            follows = value and not re.search(r"\w", text[letter.end() : value[0].start])
            return f"({letter[1]}) {value[0].content or ''}".strip() if follows else f"({letter[1]})"
        if between is None or len(between) > _REACH:
            continue
        if _DIRECT.fullmatch(between):
            return _list(text, candidates[first:])
        # A heading may begin with #### too.
        if anchor[0] != MARK and not _SENTENCE_END.search(between.strip()):
            return _unless_in(prompt, text, _last_of_sentence(text, candidates[first:]))
    if not candidates:
        return None
    is_all = not re.search(r"\w", text[: candidates[-1].start] + text[candidates[-1].end :])
    return candidates[-1].content if is_all else _unless_in(prompt, text, candidates[-1])


def _is_denied(text: str, start: int, end: int) -> bool:
    return bool(_DENIED_BEFORE.search(text, max(0, start - 40), start) or _DENIED_AFTER.match(text, end))


def _last_of_sentence(text: str, candidates: Sequence[Candidate]) -> Candidate:
    last = candidates[0]
    for candidate in candidates[1:]:
        if _SENTENCE_END.search(text, last.end, candidate.start):
            break
        last = candidate
    return last


def _list(text: str, candidates: Sequence[Candidate]) -> str | None:
    """Return the content of the first candidate, and of all candidates that follow after a comma each."""
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
    """Yield the candidate of a run of numbers and signs: the number after the last `=`, else no content."""
    if not any(token["number"] for token in tokens):
        return
    start, end = tokens[0].start(), tokens[-1].end()
    run = text[start:end]
    if start == 0 or text[start - 1] == "\n":
        run = re.sub(r"^[-*+] ", "", run)  # an item of a list
    *sides, value = re.split(r"[=≈]", re.sub(r"(?<!\d)\*\*|\*\*(?!\d)|[$€£¥]", "", run))
    value = re.sub(r"^\*(?=\S)|\*$", "", value.strip(" \t\u00a0")).replace("−", "-").strip("()")
    # After a word the first side belongs to the sentence: half of 84 = 42.
    begins = re.search(r"(?:\A|[^\w\s]|\n|\bis)\s*\Z", text[max(0, start - 9) : start])
    is_false = begins and any(_PLAIN.fullmatch(side.strip()) and side.strip() != value for side in sides)
    is_answer = _PLAIN.fullmatch(value) and not is_false
    yield Candidate(start, end, _number_as_latex(value) if is_answer else None, False)


def _number_as_latex(number: str) -> str:
    number = re.sub(rf"{PERCENT}$", r"\\%", number, flags=FLAGS)
    if "frac" in number:
        return number
    if re.match(r"-?[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)", number):
        return re.sub(r"[, ](?=\d{3})", "", number)
    return number.replace(",", ".")


def _joined(text: str, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, in which "and" or "or" joins two candidates to a single one with several answers."""
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


def _is_mention(text: str, start: int) -> bool:
    """Whether the empty box at `start` stands for the word box: after a word such as `in`, or before all else."""
    before = text[max(0, start - _MENTION_REACH) : start].rstrip("$` \t\r\n")
    return bool(_MENTION.search(before)) if before else start <= _MENTION_REACH


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of the outermost boxes. An unclosed box reaches to the end of the text."""
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


def _last_boxes(text: str, boxes: Sequence[tuple[int, int, str]]) -> str | None:
    if _is_denied(text, *boxes[-1][:2]):
        return None
    first = len(boxes) - 1
    while first and _BETWEEN_BOXES.fullmatch(plain(text[boxes[first - 1][1] : boxes[first][0]][:200])):
        first -= 1
    percent = "\\%" * bool(_AFTER_BOX.match(text, boxes[-1][1]))
    content = ", ".join(tidy(content.strip()) for _, _, content in boxes[first:])
    return re.sub(r"\\(?:boxed|fbox)\s*\{", "{", re.sub(r"\\?\$", "", content)).strip() + percent
