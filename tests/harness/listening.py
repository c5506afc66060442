"""Collects the log messages of the package."""

import contextlib
import logging

from ds_sp_overlap.warn import LOGGER, warn_once


@contextlib.contextmanager
def listening(level=logging.DEBUG, start_up=False):
    """Yield a list that collects the messages that the package logs in this process while the body runs.

    Collects messages of ``level`` and above. Makes `warn_once` forget its earlier messages, so that it logs them again. Leaves out
    the messages about a user's own layers, unless ``start_up`` is True.
    """
    warn_once.cache_clear()
    messages, handler, before, disabled = [], logging.Handler(level), LOGGER.level, logging.root.manager.disable
    handler.addFilter(lambda record: record.getMessage().startswith("sp_overlap"))
    handler.addFilter(lambda record: start_up or "and layers of one's own like it" not in record.getMessage())
    handler.emit = lambda record: messages.append(record.getMessage())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(level, LOGGER.getEffectiveLevel()))  # without DeepSpeed, the effective level is that of the root logger
    logging.disable(logging.NOTSET)  # earlier tests may have disabled logging
    try:
        yield messages
    finally:
        logging.disable(disabled)
        LOGGER.setLevel(before)
        LOGGER.removeHandler(handler)
