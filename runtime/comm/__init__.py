"""Communication between workers: transports, the collectives they carry, moving values between layouts."""
