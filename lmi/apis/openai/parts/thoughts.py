"""A reader of the thought before an answer: the text between two marks."""

from lmi.apis.openai.parts.buffer import AnswerBuffer, Reading, Thought, cut

# The marks of thoughts by their forms.
THOUGHT_MARKS = {
    # DeepSeek R1, Qwen 3 and most others write these.
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}


def thoughts(buffer: AnswerBuffer, form: str = "think", prompt: str = "") -> Reading:
    """Read the thought before an answer, if it has one.

    If the prompt ends with the opening mark, as some templates write it, the answer begins with the
    thought.
    """
    opening, closing = THOUGHT_MARKS[form]
    text = buffer.text.lstrip()
    while len(text) < len(opening) and opening.startswith(text) and not buffer.is_over:
        yield None
        text = buffer.text.lstrip()

    if text.startswith(opening):
        text = text.removeprefix(opening)
    elif not prompt.rstrip().endswith(opening):
        return

    buffer.text = text.lstrip()
    has_thought = False
    while True:
        before, mark, buffer.text = cut(buffer.text, closing)
        if buffer.is_over and not mark:
            before += buffer.take()

        if not has_thought:
            before = before.lstrip()

        thought = before.rstrip()
        if thought:
            has_thought = True
            yield Thought(thought)

        if mark:
            break

        if buffer.is_over:
            return

        # White space may be at the end of the thought, so it waits.
        buffer.text = before[len(thought) :] + buffer.text
        yield None

    while not buffer.text.strip() and not buffer.is_over:
        yield None

    buffer.text = buffer.text.lstrip()
