"""What starts the agents of other hosts: the user, ssh, Ray or Slurm. None takes part in what follows."""
