"""Taking guards out (`helpers.guards`): each test file has its own at its end."""

import pytest

from tests.helpers.guards import Guard, removed


def test_a_guard_that_the_code_no_longer_holds_is_reported():
    with (
        pytest.raises(LookupError, match="holds 0 times the guard"),
        removed(Guard("relayout.ops:_copy_in", "no such text", "pass")),
    ):
        pass
