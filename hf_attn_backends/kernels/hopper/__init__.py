"""The Hopper kernel (sm_90): Gluon, warp-specialised."""
