"""The words for "answer" and "or" in other languages, which precede a stated answer and an alternative."""

from __future__ import annotations

import re

WORDS = {
    "Arabic": ("الإجابة الجواب", "هي هو"),
    "Bengali": ("উত্তর", "হল"),
    "Chinese": ("答案 正确选项 故选 因此选 所以选 应选 最终答案 正確答案", "是 为 為 应为"),
    "Czech": ("odpověď", "je"),
    "Dutch": ("antwoord", "is"),
    "Finnish": ("vastaus", "on"),
    "French": ("réponse", "est"),
    "German": ("Antwort Lösung", "ist lautet"),
    "Greek": ("απάντηση", "είναι"),
    "Hebrew": ("התשובה תשובה", "היא"),
    "Hindi": ("उत्तर", "है"),
    "Hungarian": ("válasz", ""),
    "Indonesian": ("jawaban jawabannya", "adalah"),
    "Italian": ("risposta", "è"),
    "Japanese": ("答え 正解 解答 正答", "は"),
    "Korean": ("정답 답", "은 는"),
    "Persian": ("پاسخ", ""),
    "Polish": ("odpowiedź odpowiedzią", "to jest"),
    "Portuguese": ("resposta", "é"),
    "Romanian": ("răspunsul răspuns", "este"),
    "Russian": ("ответ", "это"),
    "Spanish": ("respuesta", "es"),
    "Swahili": ("jibu", "ni"),
    "Swedish": ("svaret svar", "är"),
    "Thai": ("คำตอบ ตอบ", "คือ"),
    "Turkish": ("cevap yanıt", ""),
    "Ukrainian": ("відповідь", "це"),
    "Vietnamese": ("đáp án|câu trả lời", "là"),
}
"""Language → its words for "answer" and its words for "is", separated by spaces (or, if they hold some, by bars).

A word counts if an "is" or a colon follows; those that name an action, "therefore choose", also if the answer follows.
"""

_ACTIONS = ("故选", "因此选", "所以选", "应选", "ตอบ")


def _words(text: str) -> list[str]:
    return [re.escape(word).replace(r"\ ", r"\s+") for word in (text.split("|") if "|" in text else text.split())]


def _pattern() -> str:
    names = sorted({word for nouns, _ in WORDS.values() for word in _words(nouns)}, key=len, reverse=True)
    verbs = sorted({word for _, copulas in WORDS.values() for word in _words(copulas)}, key=len, reverse=True)
    adjective = (
        r"(?:\s+(?:correcta|correcte|corretta|correta|finale?|final|correct[ae]?|poprawna|prawidłowa|richtige))?"
    )
    ends_in_latin = r"(?<![a-zà-ž])|(?![A-Za-z])"
    is_ = rf"\s*\*{{0,2}}\s*(?:[:：=]|(?:{'|'.join(verbs)})(?:{ends_in_latin})\s*[:：]?)"
    return rf"(?:{'|'.join(names)}){adjective}{is_}|(?:{'|'.join(_ACTIONS)})(?=\s*[(（A-J])"


_STATEMENT = re.compile(rf"(?:{_pattern()})[\s:：*]*(?=\S)", re.IGNORECASE)
_NOUNS = [
    noun.casefold() for nouns, _ in WORDS.values() for noun in (nouns.split("|") if "|" in nouns else nouns.split())
]

_ASCII_NOUNS = [noun for noun in _NOUNS if noun.isascii()]


def foreign_statements(text: str) -> list[re.Match[str]]:
    """The words of the table with their "is" or colon in a text: `Antwort:`, `答案是`, `la respuesta es`."""
    folded = text.casefold()  # most texts hold none of the words, which a search for each shows soonest
    nouns = _ASCII_NOUNS if text.isascii() else _NOUNS
    return list(_STATEMENT.finditer(text)) if any(noun in folded for noun in nouns) else []


OR = "oder ou o или або lub nebo ή veya hoặc atau eller vagy 或者 或是 或 または もしくは か 또는 أو یا या หรือ"
"""Words for "or"."""

FOREIGN_OR = rf"(?:{'|'.join(OR.split())})(?![A-Za-z\u00c0-\u04ff])"
"""Matches a word for "or", where an alternative may follow."""
