#![no_main]

kiln_fuzz::program!(tekken);
