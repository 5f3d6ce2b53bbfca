"""Ray: the session, placement, worker groups, dispatch, the watchdog, and the clean-up of stray processes."""
