"""Groups of samples: how tasks are read, groups are started and filtered, and steps are put together and resumed."""
