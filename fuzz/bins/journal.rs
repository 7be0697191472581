#![no_main]

kiln_fuzz::program!(journal);
