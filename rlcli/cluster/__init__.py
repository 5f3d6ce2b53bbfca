"""Ray: the session, placement, worker groups, dispatch, the watchdog, the clean-up of stray processes, restarts."""
