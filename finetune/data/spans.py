"""Where a chat template put each assistant turn: character spans of the text that the model has to write itself.

Hardly a published template marks its assistant turns, a conversation's prefix need not render as a prefix of the whole
(some templates treat the last turn differently), and content may occur twice. So each content is rendered once more
with a mark at its end, and the two renderings are laid over each other: that gives every content's end exactly. A turn
begins where the generation prompt would have ended, and ends with the template's end-of-turn token; both are measured
on a probe conversation. What lies between must be the content, or the template is refused by name: nothing is guessed.
Templates with {% generation %} marks are taken at their word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from finetune.data.cells import RowError, empty_answer, is_empty
from finetune.data.chat import Conversation, Message
from finetune.data.chat_writer import ChatWriter
from finetune.data.shown import REASONING, check_shown, texts_in, veiled
from finetune.errors import DataError

PROBES = ("qzprobeone", "qzprobetwo", "qzprobethree")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHT = re.compile(r"\s*</?think(ing)?>")
"""Where thoughts begin or end: a model is asked with its thoughts open, and old turns are written with them closed."""
STOPPED = "answers that already ended with the stop token (not doubled)"
DROPPED_CONTENT = "assistant contents that the chat template leaves out beside tool calls"

Span = tuple[int, int]


@dataclass(frozen=True)
class Probe:
    """What a chat template does around a user and an assistant turn.

    `header` ends the generation prompt; `lead` is what the template itself puts between it and an answer; `stop` ends
    a turn; `every` says whether each turn has it, or the last one only; `injected` is the system text that appears
    although the conversation has none.
    """

    header: str
    lead: str
    stop: str
    every: bool
    injected: str
    warnings: tuple[str, ...]


class ChatForm:
    """A tokenizer's chat template, measured once. `render` gives a conversation's text and its assistant spans."""

    def __init__(self, tokenizer: Any, bounded: bool = False) -> None:
        """`bounded`: the template is of an unknown person's file, so each text is written under the sandbox's bounds."""
        self._writer = ChatWriter(tokenizer, bounded)
        self._marked: dict[str, bool] = {}
        self._tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.begin = tokenizer.bos_token or ""
        self.probe = _measure(self)
        self._stops = {self.probe.stop, tokenizer.eos_token or ""} - {""}

    def text(self, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str:
        """The template's text; DataError with the template's own message where it refuses the conversation."""
        try:
            return self._writer.text(messages, tools, prompt)
        except Exception as error:
            # A chat template is a program that came with the model: whatever it raises is a fault of the template.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(f"the chat template of {self.name} refuses the conversation: {reason}") from error

    def added_token(self, text: str) -> str:
        """The added token that `text` begins with, the longest one, or ''."""
        names = [name for name in self._tokenizer.get_added_vocab() if text.startswith(name)]
        return max(names, key=len, default="")

    def template(self, tools: Any = None) -> str:
        """The template's source; a tokenizer may have another one for conversations with tools."""
        return str(self._tokenizer.get_chat_template(tools=tools))

    def render(self, talk: Conversation, where: str, notes: set[str]) -> tuple[str, dict[int, Span]]:
        """The text, and for each assistant message (by index) the span that the model must write.

        Raises RowError when the template refuses the row, drops one of its messages, or changes an answer.
        """
        messages = [self._without_stop(message, notes) for message in talk.messages]
        for number, message in enumerate(messages, start=1):
            if message["role"] == "assistant" and is_empty(message["content"]) and not message.get("tool_calls"):
                raise empty_answer(f"{where}, message {number}")
        try:
            text = self.text(messages, talk.tools)
            notes |= check_shown(self.text, messages, talk.tools, text, self.name)
            if self._has_marks(self.template(talk.tools)):
                return text, self._from_marks(messages, talk.tools, text)
            ends = self._content_ends(messages, talk.tools, text)
            seen = self._veiled(messages, talk.tools, text)
            return text, self._turns(messages, (text, seen), ends, notes)
        except RowError:
            raise
        except DataError as error:
            reason = error.fault.what
            raise RowError(reason, where, reason=reason, remedy="mend the row, or use another data.template") from error

    def _has_marks(self, source: str) -> bool:
        if source not in self._marked:
            self._marked[source] = MARKED.search(source) is not None
        return self._marked[source]

    def _veiled(self, messages: list[Message], tools: Any, text: str) -> str:
        """The text without stop tokens that came with the row, every other character where it was.

        A turn with tool calls ends at the first stop token behind its content, and a call's arguments may hold one.
        """
        stop = self.probe.stop
        if not stop or not any(message.get("tool_calls") for message in messages):
            return text
        if not any(stop in own for own in texts_in([messages, tools])):
            return text
        hidden = self.text(veiled(messages, stop), veiled(tools, stop))
        if len(hidden) == len(text):
            return hidden
        if hidden.count(stop) == text.count(stop):
            return text  # the template writes them in another way, so that none stands in the text
        raise DataError(f"the row holds {stop!r}, and the chat template of {self.name} changes it in a tool call")

    def _without_stop(self, message: Message, notes: set[str]) -> Message:
        """An answer that brings its own stop token would end with two."""
        if message["role"] != "assistant":
            return message
        content = message["content"]
        for stop in self._stops:
            while content.rstrip().endswith(stop):
                notes.add(STOPPED)
                content = content.rstrip()[: -len(stop)]
        return message if content is message["content"] else {**message, "content": content}

    def _content_ends(self, messages: list[Message], tools: Any, text: str) -> dict[int, int]:
        """Message index: where its content ends in `text`. Messages without content are left out."""
        for roles in (None, ("assistant",)):
            marked = [
                index
                for index, message in enumerate(messages)
                if message["content"].strip() and (roles is None or message["role"] in roles)
            ]
            mark = _mark(text)
            copies = [
                {**message, "content": message["content"] + f"{mark}{index}{mark}"} if index in marked else message
                for index, message in enumerate(messages)
            ]
            pieces = re.split(f"{mark}(\\d+){mark}", self.text(copies, tools))
            cuts = _lay_over(text, pieces[::2])
            if cuts is None:
                continue
            found = [int(index) for index in pieces[1::2]]
            self._all_shown(messages, marked, found)
            return dict(zip(found, cuts, strict=True))
        raise DataError(f"the chat template of {self.name} writes a content in a way in which turns cannot be found")

    def _all_shown(self, messages: list[Message], marked: list[int], found: list[int]) -> None:
        for index in marked:
            message, times = messages[index], found.count(index)
            if times == 1 or (times == 0 and message.get("tool_calls")):
                continue
            times_text = "does not show" if times == 0 else f"shows {times} times"
            raise DataError(f"the chat template of {self.name} {times_text} message {index + 1} ({message['role']})")

    def _turns(
        self, messages: list[Message], texts: tuple[str, str], ends: Mapping[int, int], notes: set[str]
    ) -> dict[int, Span]:
        """`texts`: as it is, and veiled."""
        text, seen = texts
        spans: dict[int, Span] = {}
        last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        previous = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            own = ends.get(index)
            if own is None and message["content"].strip():
                notes.add(DROPPED_CONTENT)
            before = [
                end
                for other, end in ends.items()
                if other < index and messages[other]["role"] != "system" and (own is None or end < own)
            ]
            lower = max([previous, *before])
            upper = min([end for other, end in ends.items() if other > index and end > lower], default=len(text))
            start = self._start(text, message, lower, upper if own is None else own)
            end = self._end(seen, message, start if own is None else own, upper, index == last)
            if own is not None:
                self._check(text[start:own], message, index)
            spans[index] = (start, end)
            previous = end
        return spans

    def _start(self, text: str, message: Message, lower: int, upper: int) -> int:
        """Just behind the turn's header; where a template has none there (after a tool's result), at the content."""
        header = self.probe.header
        found = text.find(header, lower, upper) if header else -1
        if found >= 0:
            return found + len(header)
        content = message["content"].strip()
        found = text.rfind(content, lower, upper) if content else -1
        if found < 0:
            raise DataError(f"the chat template of {self.name} writes an assistant turn without its header {header!r}")
        return found

    def _end(self, text: str, message: Message, content_end: int, upper: int, last: bool) -> int:
        """Behind the turn's stop token; between content and stop may stand white space, or the turn's tool calls."""
        stop = self.probe.stop
        found = text.find(stop, content_end, upper) if stop else -1
        if found >= 0 and (message.get("tool_calls") or not text[content_end:found].strip()):
            return found + len(stop)
        if not message.get("tool_calls") and not (stop and (last or self.probe.every)):
            return content_end
        raise DataError(f"the chat template of {self.name} ends an assistant turn without {stop!r}")

    def _check(self, written: str, message: Message, index: int) -> None:
        """The trained text before the stop is the content, perhaps behind the template's own lead or reasoning."""
        content = message["content"].strip()
        answer = content.rsplit("</think>", 1)[-1].strip()
        if written.rstrip().endswith(content):
            rest = written.rstrip()[: -len(content)].strip()
            if not rest or rest == self.probe.lead.strip() or any(message.get(key) for key in REASONING):
                return
        elif answer != content and written.rstrip().endswith(answer):
            return
        what = f"the chat template of {self.name} changes the text of message {index + 1} (assistant)"
        raise DataError(f"{what}: {written[:80]!r} is to be learned for {content[:80]!r}")

    def _from_marks(self, messages: list[Message], tools: Any, text: str) -> dict[int, Span]:
        """Spans of the template's own {% generation %} marks, one for each assistant message, stop token included."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template(tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        marks = rendered[1]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks[0]) != len(answers):
            covered = f"{len(marks[0])} of {len(answers)} turns"
            raise DataError(f"the generation marks in the chat template of {self.name} cover {covered}")
        spans = {}
        for index, (start, end) in zip(answers, marks[0], strict=True):
            stop = self.probe.stop
            missing = bool(stop) and not text[start:end].rstrip().endswith(stop) and text.startswith(stop, end)
            end = end + len(stop) if missing else start + len(text[start:end].rstrip())
            spans[index] = (start, end)
        return spans


def _mark(text: str) -> str:
    """A private-use character, repeated until the text does not hold it."""
    mark = "\ue0e7"
    while mark in text:
        mark += "\ue0e7"
    return mark


def _lay_over(text: str, pieces: Sequence[str]) -> list[int] | None:
    """Where the pieces meet in `text`, which is their concatenation; a piece may lose the white space at its end.

    Contents whose outer white space is trimmed by the template are why: the mark keeps it from being trimmed.
    None when no such cut exists.
    """
    if "".join(pieces) == text:  # nothing was lost, and then no other cut has the text's length
        return list(accumulate(map(len, pieces)))[:-1]
    states: dict[int, list[int]] = {0: []}
    for number, piece in enumerate(pieces):
        shorter = piece.rstrip() if number < len(pieces) - 1 else piece
        following: dict[int, list[int]] = {}
        for at, cuts in states.items():
            for variant in dict.fromkeys((piece, shorter)):
                if text.startswith(variant, at):
                    following.setdefault(at + len(variant), [*cuts, at + len(variant)])
        states = following
    whole = states.get(len(text))
    return None if whole is None else whole[:-1]


def _shared_start(left: str, right: str, form: ChatForm) -> str:
    """What both texts begin with, in whole tokens: <|im_start|> and <|im_end|> share nothing."""
    shorter = min(len(left), len(right))
    cut = next((at for at in range(shorter) if left[at] != right[at]), shorter)
    if cut == len(left) or cut == len(right):
        return left[:cut]
    for at in range(cut):
        if any(at + len(form.added_token(text[at:])) > cut for text in (left, right)):
            return left[:at]
    return left[:cut]


def _after(text: str, probe: str, form: ChatForm) -> str:
    if text.count(probe) != 1:
        raise DataError(f"the chat template of {form.name} does not show a message's content exactly once")
    return text.split(probe)[1]


def _measure(form: ChatForm) -> Probe:
    """Renders user, assistant, user and prefixes of it, and reads the template's parts off."""
    user, answer, again = PROBES
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    asked = _after(form.text(messages[:1]), user, form)
    prompt = _after(form.text(messages[:1], prompt=True), user, form)
    whole, two = form.text(messages), form.text(messages[:2])
    middle, tail = _after(whole, answer, form).split(again)[0], _after(two, answer, form)
    between = _after(two, user, form).split(answer)[0]
    warnings: list[str] = []
    header, lead = _header(form, asked, prompt, between, warnings)
    stop = form.added_token(tail.lstrip()) or (tail.strip() if middle.lstrip().startswith(tail.strip()) else "")
    every = bool(stop) and middle.lstrip().startswith(stop)
    if not stop:
        warnings.append(
            f"the chat template of {form.name} ends no turn with a stop token: the model cannot learn to stop"
        )
    elif not every:
        warnings.append(f"the chat template of {form.name} ends only the last turn with a stop token")
    opening = middle.lstrip()[len(stop) if every else 0 :].lstrip()
    injected = whole.split(user)[0].removesuffix(opening).strip() if opening else ""
    injected = "" if injected == form.begin else injected
    if "strftime_now" in form.template():
        warnings.append(
            f"the chat template of {form.name} writes today's date: the same rows give other tokens tomorrow"
        )
    return Probe(header, lead, stop, every, injected, tuple(warnings))


def _header(form: ChatForm, asked: str, prompt: str, between: str, warnings: list[str]) -> tuple[str, str]:
    """The generation prompt's end as training text has it, and the template's own text between it and an answer."""
    common = _shared_start(prompt, between, form)
    if prompt == asked and between[len(common) :].strip():
        warnings.append(
            f"the chat template of {form.name} ignores add_generation_prompt: answers start without a header"
        )
        return between[len(common) :], ""
    extra, lead = prompt[len(common) :], between[len(common) :]
    if extra.strip() and lead.strip() and not (THOUGHT.match(extra) and THOUGHT.match(lead)):
        what = f"the chat template of {form.name} asks for an answer with {prompt!r}, and writes {between!r} before one"
        raise DataError(what, remedy="write both alike, so that a turn's header is never learned")
    if extra:
        warnings.append(
            f"the chat template of {form.name} asks for an answer with {extra!r}, which training text lacks"
        )
    if lead.strip():
        warnings.append(
            f"the chat template of {form.name} puts {lead!r} before an answer; it is trained, as the model writes it"
        )
    header = common[len(asked) :] if common.startswith(asked) and len(common) > len(asked) else common.lstrip()
    return header, lead
