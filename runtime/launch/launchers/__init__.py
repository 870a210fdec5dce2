"""What starts the agents of other hosts: the user, ssh or Ray. None takes part in what follows."""
