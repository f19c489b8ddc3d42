import sys

from launch.compile import main

sys.exit(main())
