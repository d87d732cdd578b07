"""The one error that is the caller's fault; every script turns it into a line on stderr and exit code 2."""


class UserError(Exception):
    """A mistake of the caller's: the message says what is wrong, what was got and what to write instead."""


def first_line(error: BaseException) -> str:
    """What an error says first; its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
