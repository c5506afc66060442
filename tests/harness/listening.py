"""Listen to what the package says in passing."""

import contextlib
import logging

from ds_sp_overlap.warn import LOGGER, warn_once


@contextlib.contextmanager
def listening(level=logging.DEBUG, start_up=False):
    """Yield the messages of this process inside, of ``level`` and above, those that are said once included; with what layers of one's own
    got if ``start_up``.
    """
    warn_once.cache_clear()
    messages, handler, before, disabled = [], logging.Handler(level), LOGGER.level, logging.root.manager.disable
    handler.addFilter(lambda record: record.getMessage().startswith("sp_overlap"))
    handler.addFilter(lambda record: start_up or "and layers of one's own like it" not in record.getMessage())
    handler.emit = lambda record: messages.append(record.getMessage())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(level, LOGGER.getEffectiveLevel()))  # of the root, where nobody imported DeepSpeed
    logging.disable(logging.NOTSET)  # whatever ran in this process before
    try:
        yield messages
    finally:
        logging.disable(disabled)
        LOGGER.setLevel(before)
        LOGGER.removeHandler(handler)
