"""`moaic check`: proof that plans compute the same as their step on one device, on virtual ranks and on workers."""
