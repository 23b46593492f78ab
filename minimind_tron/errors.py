"""The one error a user is meant to read."""


class TronError(Exception):
    """A mistake of the user: what was given, and what to do instead.

    ``what`` names the value that was given and what is wanted; ``fix`` names the flag or the file to change. The command line
    prints ``what; fix`` as one line and exits with code 2. Broken invariants of this package are assertions, never this.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[type["TronError"], tuple[str, str]]:
        # Exceptions are pickled as their message alone, and ranks send each other this one.
        return type(self), (self.what, self.fix)
