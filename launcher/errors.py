"""What ends a command with one sentence."""


class LaunchError(Exception):
    """One sentence for the operator: what, found, expected, remedy."""


class Interrupted(BaseException):
    """Ctrl-C, a hang-up or SIGTERM; not an Exception, so that no handler mistakes it for a failure."""
