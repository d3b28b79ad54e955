"""The one exception that users are meant to see."""


class CudiffError(Exception):
    """A mistake or a limit that a user can mend: one line that says what to do next."""
