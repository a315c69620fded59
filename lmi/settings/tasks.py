"""The tasks that a model may be asked to do, as `option.task` names them."""

from lmi.settings.handler import USER_CODE
from lmi.settings.steps import Resolution
from lmi.settings.values import Values

# Values of option.task; the checkpoint says which of them the model is for.
OF_EMBEDDINGS = ("feature-extraction", "text-embedding")
TASKS = (
    "auto",
    "text-generation",
    "text2text-generation",
    "conversational",
    "generate",
    *OF_EMBEDDINGS,
)
# A task of engines that read images.
OF_IMAGES = "image-text-to-text"
TASK = "option.task"


def check_task(resolution: Resolution) -> None:
    """Refuse a task that no engine here does, or that the chosen one does not do."""
    values = resolution.values
    handler = resolution.chosen_engine.handler
    if handler is USER_CODE:
        return

    task = task_of(values)
    if task == OF_IMAGES and not handler.reads_images:
        handlers = values.start.handlers
        readers = [name for name, handler in handlers.items() if handler.reads_images]
        values.refuse(
            TASK,
            f"{', '.join(TASKS)}; {OF_IMAGES} with option.rolling_batch={' or '.join(readers)}, "
            f"once installed",
        )
    elif task not in (*TASKS, OF_IMAGES):
        only = "engines here generate text or give embeddings, and do nothing else; a model.py can"
        values.refuse(TASK, f"{', '.join((*TASKS, OF_IMAGES))} ({only})")


def is_for_embeddings(values: Values) -> bool:
    """Return whether `option.task` asks for embeddings."""
    return task_of(values) in OF_EMBEDDINGS


def task_of(values: Values) -> str:
    """Return the task that was given, as the hub spells it."""
    task: str = values.given(TASK, "auto")
    return task.lower().replace("_", "-")
